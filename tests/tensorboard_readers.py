"""Reader of TensorBoard event files."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def seen(run_dir, tag):
    """Return (step, value) of every event with this tag."""
    return [
        (event.step, event.value) for event in EventAccumulator(str(run_dir)).Reload().Scalars(tag)
    ]
