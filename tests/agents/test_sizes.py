"""Test how ranks divide sizes, and that error messages propose valid sizes."""

import contextlib
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from agents.config import RunConfig, with_threads
from agents.learner.network.noise import sequence_orders
from agents.learner.settings import AUTO_SIZE, TrainConfig
from agents.learner.sizes import Sizes, shard_sizes
from agents.run.choice import resumed_config

WEAK = {"scaling": "weak", "num_envs": 8, "batch_size": 16}


def sizes_of(num_ranks, saved_num_envs=0, **options):
    config = TrainConfig(**options)
    return [shard_sizes(config, rank, num_ranks, saved_num_envs) for rank in range(num_ranks)]


EACH_SIZE = pytest.mark.parametrize("num_ranks", [1, 4, 16])


@EACH_SIZE
def test_strong_scaling_divides_the_totals_among_ranks(num_ranks):
    share = Sizes(64 // num_ranks, 0, 128 // num_ranks, 4, 2, 64, 128)
    expected = [replace(share, env_offset=rank * share.num_envs) for rank in range(num_ranks)]
    assert sizes_of(num_ranks) == expected


@EACH_SIZE
def test_weak_scaling_multiplies_the_totals_by_the_number_of_ranks(num_ranks):
    (alone,) = sizes_of(1, **WEAK)
    totals = {"global_num_envs": 8 * num_ranks, "global_batch_size": 16 * num_ranks}
    expected = [replace(alone, env_offset=8 * rank, **totals) for rank in range(num_ranks)]
    assert sizes_of(num_ranks, **WEAK) == expected


@EACH_SIZE
@pytest.mark.parametrize("rule, power", [("none", 0), ("sqrt", 0.5), ("linear", 1)])
def test_weak_scaling_scales_the_learning_rate(rule, power, num_ranks):
    share, *_ = sizes_of(num_ranks, **WEAK, lr_scaling=rule)
    assert share.learning_rate_factor == num_ranks**power


@pytest.mark.parametrize("num_ranks", [1, 3, 6, 7, 12])
def test_random_sizes_work_or_all_proposed_sizes_do(num_ranks):
    rng = np.random.default_rng(num_ranks)
    outcomes = []
    for _ in range(300):
        options = {
            "batch_size": int(rng.integers(1, 200)) * (num_ranks if rng.random() < 0.5 else 1),
            "num_envs": int(rng.integers(0, 300) * rng.integers(2)),
            "num_steps": 8 * int(rng.integers(1, 13)),
            "bptt_steps": 8,
            "scaling": str(rng.choice(["strong", "weak"])),
            "grad_accumulation": int(rng.choice([1, 1, 2, 3])),
        }
        proposals = [{}]
        try:
            sizes_of(num_ranks, **options)
        except ValueError as error:
            flags = re.findall(r"--(\w+) (\d+)", str(error))
            proposals = [{name: int(number)} for name, number in flags]
            assert proposals or str(error).endswith(f"multiples of {num_ranks} for both")
        for changed in proposals:
            for share in sizes_of(num_ranks, **(options | changed)):
                collected = share.num_envs * share.sequences_per_env
                assert collected == share.batch_size * share.num_minibatches > 0
        outcomes.append(proposals)
    assert [{}] in outcomes and any(map(any, outcomes))


def test_minibatches_of_all_ranks_together_equal_those_of_one_rank():
    """Check 400 random sets of sizes that are valid on one rank and on several."""
    rng = np.random.default_rng(5)
    strata = []
    while len(strata) < 400:
        num_ranks = int(rng.choice([2, 3, 4, 5, 6, 7, 8, 12]))
        batch_size, num_envs = (num_ranks * int(rng.integers(1, 7)) for _ in range(2))
        steps = int(rng.integers(1, 9))
        options = {"batch_size": batch_size, "num_envs": num_envs, "num_steps": steps}
        with contextlib.suppress(ValueError):
            ranks = sizes_of(num_ranks, **options, bptt_steps=1)
            (alone,) = sizes_of(1, **options, bptt_steps=1)
            key = tuple(rng.integers(0, 100, 2).tolist())
            whole = global_sequences(alone, key)
            together = np.concatenate([global_sequences(rank, key) for rank in ranks], axis=1)
            assert np.array_equal(np.sort(together), np.sort(whole))
            # Every sequence is used exactly once.
            assert sorted(whole.ravel()) == list(range(num_envs * steps))
            strata.append(alone.num_minibatches // math.gcd(alone.num_minibatches, steps))
    assert len(set(strata)) > 4


def global_sequences(rank, key):
    """Return the global numbers of a rank's sequences, [num_minibatches, sequences]."""
    share = (rank.env_offset, rank.num_envs, rank.sequences_per_env, rank.num_minibatches)
    time, env = np.divmod(sequence_orders(key, 3, *share)[2], rank.num_envs)
    return time * rank.global_num_envs + rank.env_offset + env


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_resumed_run_with_weak_scaling_keeps_its_totals_and_learning_rate(num_ranks):
    options = WEAK | {"lr_scaling": "linear"}
    begun, share = sizes_of(4, **options)[0], sizes_of(num_ranks, 32, **options)[0]
    assert share.num_envs * num_ranks == begun.global_num_envs == 32
    for name in ("global_batch_size", "num_minibatches", "learning_rate_factor"):
        assert getattr(share, name) == getattr(begun, name), name


@pytest.mark.parametrize("num_ranks, near", [(3, [2, 4]), (12, [8, 16]), (10**6, [32])])
def test_a_resumed_run_that_does_not_divide_names_the_nearest_numbers_of_ranks(num_ranks, near):
    with pytest.raises(ValueError, match="batch_size") as caught:
        sizes_of(num_ranks, 32, **WEAK)
    assert [int(number) for number in re.findall(r"--num_gpus (\d+)", str(caught.value))] == near


def test_a_batch_that_does_not_fit_explains_that_it_counts_sequences():
    with pytest.raises(ValueError, match="sequences of 32 steps.* 8 per rollout"):
        shard_sizes(TrainConfig(num_envs=4, num_steps=64, batch_size=64), 0, 1)


@pytest.mark.parametrize(
    "batch_size, threads, expected", [(8, 0, 1), (8, 3, 3), (512, 0, 0), (AUTO_SIZE, 0, 0)]
)
def test_a_small_network_uses_one_thread(batch_size, threads, expected):
    values = {"batch_size": batch_size, "threads": threads, "hidden_size": 64}
    assert with_threads(RunConfig().changed(values)).launch.threads == expected


@pytest.mark.parametrize(
    "given, expected", [({}, 3), ({"num_gpus": 2}, 0), ({"num_gpus": 2, "threads": 5}, 5)]
)
def test_a_resume_on_as_many_ranks_keeps_the_threads(given, expected):
    saved = RunConfig().changed({"threads": 3, "num_gpus": 1})
    assert resumed_config(saved, given).launch.threads == expected
