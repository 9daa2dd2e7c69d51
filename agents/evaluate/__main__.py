"""Run as `python -m agents.evaluate`."""

import sys

from agents.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
