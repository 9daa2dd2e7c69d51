"""Run as `python -m agents.pretrain`."""

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while modules load is no error
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agents.pretrain.command import main
    from rl_dist.errors import outlive_readers

    outlive_readers()
    sys.exit(main())
