"""Run as `python -m rl_dist.speedup`."""

import sys

from rl_dist.speedup.command import main

if __name__ == "__main__":
    sys.exit(main())
