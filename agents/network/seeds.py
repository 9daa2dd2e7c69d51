"""Seed streams: what is drawn from one never overlaps another."""

from __future__ import annotations

import numpy as np

# Streams of SeedSequence([seed, stream, ...]): what is drawn from one never overlaps another.
POLICY_STREAM, ENVIRONMENT_STREAM, NOISE_STREAM, SHUFFLE_STREAM, VALIDATION_STREAM = range(5)
# not by the episodes of validation, which have chosen the best checkpoint, is a policy evaluated
PREDICTION_STREAM, EVALUATION_STREAM = 5, 6


def stream_seeds(seed: int, stream: int, first: int, count: int, resumed_at: int = 0) -> list[int]:
    """Seeds number first .. first + count - 1 of a stream, one 63-bit integer each.

    For environments the number is their global index; `resumed_at` is the iteration from
    which a run goes on whose environments cannot be snapshotted: other episodes than before.
    """
    sequences = (
        np.random.SeedSequence([seed, stream, first + i, resumed_at]) for i in range(count)
    )
    return [int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)) for sequence in sequences]
