"""Run as `python -m agents.evaluate`.

The command is apart: new ranks find its functions by the name of their module.
"""

import sys

from agents.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
