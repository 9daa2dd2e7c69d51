"""Run as `python -m rl_dist.speedup`."""

import sys

from rl_dist.speedup.command import leave_at_signals, main

if __name__ == "__main__":
    leave_at_signals()
    sys.exit(main())
