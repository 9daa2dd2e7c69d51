"""Run as `python -m rl_dist.status`."""

import sys

from rl_dist.status.command import main

if __name__ == "__main__":
    sys.exit(main())
