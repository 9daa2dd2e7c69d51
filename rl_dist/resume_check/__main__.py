"""Run as `python -m rl_dist.resume_check`."""

import sys

from rl_dist.resume_check.command import main

if __name__ == "__main__":
    sys.exit(main())
