"""Run as `python -m rl_dist.speedup`."""

import sys

from rl_dist.launch.child import leave_at_signals
from rl_dist.speedup.command import main

if __name__ == "__main__":
    leave_at_signals()
    sys.exit(main())
