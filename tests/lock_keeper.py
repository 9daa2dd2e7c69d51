"""Process target that receives a lock; imports nothing, so that it starts fast."""


def keep(lock, done):
    """Keep the lock until the event `done` is set."""
    done.wait()
