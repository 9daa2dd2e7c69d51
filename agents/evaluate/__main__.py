"""Run as `python -m agents.evaluate`.

The command is in its own module, because new rank processes import its functions by module name.
"""

import sys

from agents.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
