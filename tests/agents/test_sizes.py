import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest

from agents.config import AUTO, RunConfig, TrainConfig, with_threads
from agents.network.noise import sequence_orders, stratum_size
from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.run.choice import parse_training, resumed_config
from agents.run.sizes import Sizes, shard_sizes
from agents.run.start import sizes_table
from rl_dist.launch.config import LaunchConfig


def sizes_of(num_ranks, saved_num_envs=0, **options):
    config = TrainConfig(**options)
    return [shard_sizes(config, rank, num_ranks, saved_num_envs) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_64_environments_and_two_minibatches_of_128_sequences_are_shared_out(num_ranks):
    share = Sizes(64 // num_ranks, 0, 128 // num_ranks, 4, 2, 64, 128)
    expected = [replace(share, env_offset=rank * share.num_envs) for rank in range(num_ranks)]
    assert sizes_of(num_ranks) == expected


def test_weak_scaling_gives_every_rank_what_one_rank_would_have():
    weak = {"scaling": "weak", "num_envs": 8, "batch_size": 16}
    (alone,) = sizes_of(1, **weak)
    totals = {"global_num_envs": 32, "global_batch_size": 64}
    expected = [replace(alone, env_offset=8 * number, **totals) for number in range(4)]
    assert sizes_of(4, **weak) == expected


def proposals(message):
    """The sets of flags that a message proposes."""
    flags = message.split(": try ")[1]
    return [
        {name: int(n) for name, n in re.findall(r"--(\w+) (\d+)", part)}
        for part in flags.split(" or ")
    ]


@pytest.mark.parametrize("num_ranks", [1, 3, 5, 6, 7, 12])
def test_random_sizes_on_odd_numbers_of_ranks_work_or_every_proposal_does(num_ranks):
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
        found = [{}]
        try:
            sizes_of(num_ranks, **options)
        except ValueError as error:
            found = proposals(str(error))
            assert 1 <= len(found) <= 4, error
        for changed in found:
            for one in sizes_of(num_ranks, **(options | changed)):
                collected = one.num_envs * one.sequences_per_env
                assert collected == one.batch_size * one.num_minibatches > 0
        outcomes.append(found == [{}])
    assert any(outcomes) and not all(outcomes)


def test_minibatches_of_all_ranks_together_are_those_of_one_rank():
    """Test random sizes, as far as they are accepted."""
    rng = np.random.default_rng(5)
    strata, checked = set(), 0
    while checked < 400:
        num_ranks = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]))
        batch_size, num_envs = (num_ranks * int(rng.integers(1, 7)) for _ in range(2))
        steps = int(rng.integers(1, 9))
        options = {"batch_size": batch_size, "num_envs": num_envs, "num_steps": steps}
        with contextlib.suppress(ValueError):
            ranks = sizes_of(num_ranks, **options, bptt_steps=1)
            (alone,) = sizes_of(1, **options, bptt_steps=1)
            key = tuple(rng.integers(0, 100, 2).tolist())
            epoch = int(rng.integers(3))
            whole = global_sequences(alone, key, epoch)
            shares = [global_sequences(rank, key, epoch) for rank in ranks]
            # equally many
            assert {len(share[0]) for share in shares} == {batch_size // num_ranks}
            for minibatch, parts in zip(whole, zip(*shares, strict=True), strict=True):
                assert sorted(np.concatenate(parts)) == sorted(minibatch)
            assert sorted(whole.ravel()) == list(range(num_envs * steps))  # every sequence once
            strata.add(stratum_size(alone.num_minibatches, steps))
            checked += num_ranks > 1
    assert len(strata) > 4, strata


def global_sequences(rank, key, epoch):
    """Numbers in the whole run of a rank's sequences: [num_minibatches, sequences]."""
    share = (rank.env_offset, rank.num_envs, rank.sequences_per_env, rank.num_minibatches)
    time, env = np.divmod(sequence_orders(key, 3, *share)[epoch], rank.num_envs)
    return time * rank.global_num_envs + rank.env_offset + env


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_resumed_weak_run_keeps_the_totals_and_the_learning_rate_it_began_with(num_ranks):
    weak = {"scaling": "weak", "num_envs": 8, "batch_size": 16, "lr_scaling": "linear"}
    begun = sizes_of(4, **weak)[0]
    ranks = sizes_of(num_ranks, 32, **weak)
    assert sum(rank.num_envs for rank in ranks) == begun.global_num_envs == 32
    for name in ("global_batch_size", "num_minibatches", "learning_rate_factor"):
        assert {getattr(rank, name) for rank in ranks} == {getattr(begun, name)}, name
    assert begun.learning_rate_factor == 4.0


@pytest.mark.parametrize(
    ("options", "saved"), [({}, 64), ({"scaling": "weak", "num_envs": 8, "batch_size": 16}, 32)]
)
def test_a_resumed_run_that_does_not_divide_names_the_nearest_numbers_of_ranks(options, saved):
    works = {1, 2, 4, 8, 16, 32, 64} & set(range(1, saved + 1))
    for num_ranks in (3, 5, 12, 1000):
        with pytest.raises(ValueError, match="do not divide") as caught:
            sizes_of(num_ranks, saved, **options)
        near = [int(number) for number in re.findall(r"--num_gpus (\d+)", str(caught.value))]
        below = max(number for number in works if number < num_ranks)
        assert near == [below, 2 * below][: 2 if 2 * below <= saved else 1]


def test_the_learning_rate_grows_with_the_batch_only_where_it_is_asked_to():
    factors = {
        how: sizes_of(4, scaling="weak", lr_scaling=how)[3].learning_rate_factor
        for how in ("none", "sqrt", "linear")
    }
    assert factors == {"none": 1.0, "sqrt": 2.0, "linear": 4.0}
    assert sizes_of(4)[0].learning_rate_factor == 1


def test_the_table_says_what_each_rank_and_all_ranks_do_and_how_the_rate_is_scaled():
    sizes = {"num_envs": 8, "batch_size": 16, "num_steps": 16, "bptt_steps": 4}
    config = TrainConfig(**sizes)
    ppo = PPOConfig(update_epochs=3)
    rows = sizes_table(config, shard_sizes(config, 1, 4), 4, ppo).splitlines()
    ends = [row.split()[-2:] for row in rows[1:5]]
    assert ends == [["2", "8"], ["32", "128"], ["4", "16"], ["16", "64"]]
    assert rows[5].split()[-3:] == ["6", "6", "(together)"]
    config = TrainConfig(**sizes, scaling="weak", lr_scaling="sqrt", total_steps=4096)
    ppo = PPOConfig(learning_rate=1e-3, warmup=5)
    rate = sizes_table(config, shard_sizes(config, 0, 4), 4, ppo).splitlines()[-1]
    assert "0.001 x 2 (sqrt) = 0.002, rising over the first 5 it" in rate
    assert rate.endswith("falling to 0 over 4096 steps")


@pytest.mark.parametrize(
    ("batch_size", "hidden_size", "asked", "expected"),
    [(8, 64, 0, 1), (128, 128, 0, 0), (8, 64, 3, 3), (AUTO, 64, 0, 0)],
)
def test_a_small_network_takes_one_thread_unless_more_are_asked_for(
    batch_size, hidden_size, asked, expected
):
    config = RunConfig(
        launch=LaunchConfig(threads=asked),
        train=TrainConfig(batch_size=batch_size),
        policy=PolicyConfig(hidden_size=hidden_size),
    )
    assert with_threads(config).launch.threads == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], 3), (["--num_gpus", "2"], 0), (["--num_gpus", "2", "--threads", "5"], 5)],
)
def test_a_resumed_run_keeps_its_threads_on_the_same_number_of_ranks(flags, expected):
    saved = RunConfig(launch=LaunchConfig(threads=3, num_gpus=1))
    assert resumed_config(saved, parse_training(flags).given).launch.threads == expected
