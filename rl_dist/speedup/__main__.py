"""Run as `python -m rl_dist.speedup`."""

import signal
import sys
from typing import Any, NoReturn

from rl_dist.speedup.command import main


def _leave(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)  # through all `finally`: short runs are ended, files removed


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
