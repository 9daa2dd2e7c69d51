"""Target of a process that gets a lock; light, because the process imports it."""


def keep(lock, done):
    """Hold a lock until it is done."""
    done.wait()
