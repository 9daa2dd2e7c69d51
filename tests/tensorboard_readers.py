"""TensorBoard's reader."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def seen(run_dir, tag):
    """(step, value) of every event of a tag."""
    return [
        (event.step, event.value) for event in EventAccumulator(str(run_dir)).Reload().Scalars(tag)
    ]
