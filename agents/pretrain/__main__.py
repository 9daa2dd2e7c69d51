"""Run as `python -m agents.pretrain`."""

import sys

from agents.pretrain.command import main

if __name__ == "__main__":
    sys.exit(main())
