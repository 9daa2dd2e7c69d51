"""Run as `python -m agents.evaluate`.

The command is in command.py and not in this file, because new rank processes import its functions
by module name.
"""

import sys

from agents.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
