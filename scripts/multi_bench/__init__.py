"""The parts of `scripts/bench_multi_gpu.py`: decoding on one GPU, over two by a device map, and by tensor parallelism."""
