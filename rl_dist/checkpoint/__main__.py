"""Run as `python -m rl_dist.checkpoint`."""

import sys

from rl_dist.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
