"""Run as `python -m agents.evaluate`."""

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while modules load is no error
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agents.evaluate.command import main

    sys.exit(main())
