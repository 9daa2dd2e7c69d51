"""Run as `python -m agents.export`."""

import sys

from agents.export.command import main
from rl_dist.errors import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
