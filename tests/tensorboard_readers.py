"""TensorBoard's two readers: the one for scripts, and that of its server."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as ServerAccumulator,
)


def seen(run_dir, tag):
    """(step, value) of every event of a tag; both readers must agree."""
    script = EventAccumulator(str(run_dir)).Reload()
    server = ServerAccumulator(str(run_dir)).Reload()
    scalars = (
        [(e.step, e.value) for e in script.Scalars(tag)] if tag in script.Tags()["scalars"] else []
    )
    tensors = server.Tensors(tag) if tag in server.Tags()["tensors"] else []
    assert scalars == [(event.step, event.tensor_proto.float_val[0]) for event in tensors]
    return scalars
