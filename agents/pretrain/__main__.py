"""Run as `python -m agents.pretrain`."""

import sys

from agents.pretrain.command import main
from rl_dist.errors import outlive_readers

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
