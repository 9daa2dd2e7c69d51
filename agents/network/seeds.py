"""Streams of seeds, which never overlap."""

from __future__ import annotations

import numpy as np

# streams of SeedSequence([seed, stream, ...])
POLICY_STREAM, ENVIRONMENT_STREAM, NOISE_STREAM, SHUFFLE_STREAM, VALIDATION_STREAM = range(5)
# Evaluation never reuses validation episodes: they chose the best checkpoint.
PREDICTION_STREAM, EVALUATION_STREAM = 5, 6


def stream_seeds(seed: int, stream: int, first: int, count: int, resumed_at: int = 0) -> list[int]:
    """Return `count` seeds of a stream from number `first` on, 63 bits each.

    Environments have the seed of their global index. `resumed_at` is the iteration at which a run
    without snapshots of environments was resumed: it leads to new episodes.
    """
    sequences = (
        np.random.SeedSequence([seed, stream, first + i, resumed_at]) for i in range(count)
    )
    return [int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)) for sequence in sequences]
