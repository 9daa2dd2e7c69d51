"""Run as `python -m rl_dist.checkpoint`."""

import signal
import sys

from rl_dist.checkpoint.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
