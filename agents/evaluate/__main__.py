"""Run as `python -m agents.evaluate`.

The command is in its own module, because new rank processes import its functions by module name.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    from agents.evaluate.command import main

    sys.exit(main())
