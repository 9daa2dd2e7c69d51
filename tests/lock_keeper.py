"""What a process does that was given a lock; a light module, for it is imported there."""


def keep(lock, done):
    """Hold a lock until it is done."""
    done.wait()
