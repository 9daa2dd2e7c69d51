"""Give policy, environments, noise and evaluation separate random streams."""

from __future__ import annotations

import numpy as np

# stream numbers: each is the second entry of SeedSequence([seed, stream, ...])
POLICY_STREAM, ENVIRONMENT_STREAM, NOISE_STREAM, SHUFFLE_STREAM, VALIDATION_STREAM = range(5)
# Evaluation has its own episodes, because the best checkpoint was chosen on validation episodes.
PREDICTION_STREAM, EVALUATION_STREAM = 5, 6


def stream_seeds(seed: int, stream: int, first: int, count: int, resumed_at: int = 0) -> list[int]:
    """Return seeds `first` .. `first + count - 1` of a stream, 63 bits each.

    Each environment uses the seed at its global index. A resumed run that cannot restore its
    environments passes its iteration as `resumed_at`, so that its environments get new episodes.
    """
    keys = ([seed, stream, first + i, resumed_at] for i in range(count))
    words = (np.random.SeedSequence(key).generate_state(1, np.uint64)[0] for key in keys)
    return [int(word) >> 1 for word in words]
