"""Run as `python -m agents.pretrain`.

The command is in its own module, because new rank processes import its functions by module name.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    from agents.pretrain.command import main
    from rl_dist.errors import outlive_readers

    outlive_readers()
    sys.exit(main())
