"""Target of a process that receives a lock; few imports, for a quick start."""


def keep(lock, done):
    """Keep the lock until the event `done` is set."""
    done.wait()
