"""The Space's entry point: all of it is in `tq_hf.demo`."""

import contextlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads share two cores with the server

with contextlib.suppress(ImportError):
    import spaces  # noqa: F401  (on ZeroGPU it has to come before torch)

from tq_hf.demo import build, launch

if __name__ == "__main__":
    launch(build(public=True))
