"""What a process does that was given a lock; a light module, for it is imported there."""

import time


def keep(lock, seconds):
    """Hold a lock."""
    time.sleep(seconds)
