"""Run as `python -m agents.evaluate`.

The command is apart: new ranks find its functions by the name of their module.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load is no error
    from agents.evaluate.command import main

    sys.exit(main())
