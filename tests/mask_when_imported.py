"""Which signals are blocked in a new rank while it imports what it runs."""

import signal

from rl_dist.process_group.process_ends import STOP_SIGNALS

BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, [])


def check():
    return 0 if set(STOP_SIGNALS) <= BLOCKED else 1
