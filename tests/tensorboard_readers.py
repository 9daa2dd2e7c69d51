"""Reader of TensorBoard event files."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(run_dir):
    """Return (step, value) of every event, by tag."""
    board = EventAccumulator(str(run_dir)).Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
