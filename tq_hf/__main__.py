"""`python -m tq_hf`, which `accelerate launch -m tq_hf` needs."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
