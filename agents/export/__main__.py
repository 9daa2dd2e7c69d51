"""Run as `python -m agents.export`."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    from agents.export.command import main
    from rl_dist.launch.child import leave_at_signals

    leave_at_signals()
    sys.exit(main())
