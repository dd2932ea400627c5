"""The parts of `scripts/bench_generate.py`: whole-model decoding with one cache or another, on one GPU."""
