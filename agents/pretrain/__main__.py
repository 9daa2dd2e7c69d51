"""Run as `python -m agents.pretrain`; ranks import the command by its module."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load prints no traceback
    from agents.pretrain.command import main
    from rl_dist.errors import outlive_readers

    outlive_readers()
    sys.exit(main())
