"""Run as `python -m agents.evaluate`.

The command is in command.py, because new rank processes import the functions of the command by
module name. The module of this file is always named `__main__`.
"""

import sys

from agents.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
