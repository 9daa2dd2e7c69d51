"""Give policy, environments, noise and evaluation separate random streams."""

import numpy as np

# stream numbers: each is the second entry of SeedSequence([seed, stream, ...])
POLICY_STREAM, ENVIRONMENT_STREAM, NOISE_STREAM, SHUFFLE_STREAM, VALIDATION_STREAM = range(5)
PREDICTION_STREAM = 5
# Evaluation does not reuse the episodes of validation, because they chose the best checkpoint.
EVALUATION_STREAM = 6

SEED_BITS = 31  # many environments accept no larger seeds


def stream_seed(seed: int, stream: int) -> int:
    """Return a 63-bit seed for a stream that needs only one seed."""
    return int(np.random.SeedSequence([seed, stream, 0, 0]).generate_state(1, np.uint64)[0]) >> 1


def stream_seeds(seed: int, stream: int, first: int, count: int, resumed_at: int = 0) -> list[int]:
    """Return the 31-bit seeds of a stream for environments `first` .. `first + count - 1`.

    Environments are numbered over all ranks. A resumed run that cannot restore its environments
    passes its iteration as `resumed_at`, so that they get new episodes.

    A permutation of all 31-bit numbers, chosen by `seed` and `resumed_at`, is applied to the
    indices. So no two environments of a stream have the same seed. The streams of training,
    validation and evaluation differ in the upper two bits before the permutation; so they share no
    seed either, unless the run has more than 2**29 environments.
    """
    keys = np.random.SeedSequence([seed, resumed_at]).generate_state(8, np.uint64).reshape(4, 2)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    numbers ^= np.uint64(stream % 4 << SEED_BITS - 2)
    # Every operation can be undone, so different numbers remain different. The operations are an
    # XOR with a shifted copy, and a product with an odd factor plus a term, modulo 2**31.
    for factor, term in keys:
        numbers ^= numbers >> 15
        numbers = (numbers * (factor | 1) + term) % 2**SEED_BITS
    return (numbers ^ numbers >> 15).tolist()
