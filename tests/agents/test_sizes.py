import contextlib
import re

import numpy as np
import pytest

from agents.ppo import PPOConfig
from agents.rollout import slot_order, stratum_size
from agents.run.sizes_table import sizes_table
from agents.sizes import LR_SCALINGS, Sizes, TrainConfig, share_out


def sizes_of(num_ranks, **options):
    config = TrainConfig(**options)
    return [share_out(config, rank, num_ranks) for rank in range(num_ranks)]


def test_the_defaults_are_64_environments_and_two_minibatches_of_128_slots():
    assert sizes_of(1) == [Sizes(64, 0, 128, 4, 2, 64, 128)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_totals_are_shared_out_and_every_environment_has_one_owner(num_ranks):
    ranks = sizes_of(num_ranks)
    owned = [env for rank in ranks for env in range(rank.first_env, rank.first_env + rank.num_envs)]
    assert owned == list(range(64))
    assert all(rank.batch_size * num_ranks == 128 == rank.global_batch_size for rank in ranks)
    assert all(rank.global_num_envs == 64 and rank.num_minibatches == 2 for rank in ranks)
    for rank in ranks:  # what a rank collects is what its minibatches use up
        assert rank.num_envs * rank.slots_per_env == rank.batch_size * rank.num_minibatches


def test_weak_scaling_gives_every_rank_what_one_rank_would_have():
    (alone,) = sizes_of(1, scaling="weak", num_envs=8, batch_size=16)
    for number, rank in enumerate(sizes_of(4, scaling="weak", num_envs=8, batch_size=16)):
        assert (rank.num_envs, rank.batch_size, rank.num_minibatches) == (8, 16, alone.num_minibatches)
        assert (rank.global_num_envs, rank.global_batch_size, rank.first_env) == (32, 64, 8 * number)


def test_weak_scaling_has_a_default_that_fits_any_number_of_ranks():
    for num_ranks in (1, 2, 3, 7):
        for batch_size in (1, 2, 5, 128):
            own = sizes_of(num_ranks, scaling="weak", batch_size=batch_size)[0]
            assert own.num_envs == sizes_of(1, batch_size=batch_size)[0].num_envs


def test_the_command_of_the_literature_is_accepted():
    ranks = sizes_of(8, num_episodes=10_000, batch_size=512)
    assert ranks[0].global_num_envs == 256 and ranks[0].num_minibatches == 2


def test_the_default_number_of_environments_fits_every_batch_size_on_one_rank():
    for batch_size in range(1, 70):
        for bptt_steps in (128, 64, 32, 8):
            (sizes,) = sizes_of(1, batch_size=batch_size, bptt_steps=bptt_steps)
            assert sizes.num_envs * sizes.slots_per_env >= 2 * batch_size


def proposals(message):
    """The sets of flags that a message proposes."""
    flags = message.split(": try ")[1]
    return [{name: int(n) for name, n in re.findall(r"--(\w+) (\d+)", part)} for part in flags.split(" or ")]


BAD = [
    (3, {}),
    (3, {"num_envs": 64}),
    (1, {"num_envs": 63}),
    (2, {"num_envs": 7, "batch_size": 5}),
    (3, {"num_envs": 1, "batch_size": 2}),
    (256, {}),
    (128, {}),
    (4, {"num_envs": 10, "scaling": "weak"}),
    (6, {"num_envs": 50, "batch_size": 48, "num_steps": 96}),
    (8, {"num_envs": 20, "batch_size": 24, "num_steps": 96, "bptt_steps": 32}),
    (5, {"num_envs": 1000, "batch_size": 7, "num_steps": 64, "bptt_steps": 64}),
]


@pytest.mark.parametrize(("num_ranks", "options"), BAD)
def test_sizes_that_an_error_proposes_really_work_and_keep_the_rest(num_ranks, options):
    with pytest.raises(ValueError) as caught:
        sizes_of(num_ranks, **options)
    found = proposals(str(caught.value))
    assert found
    for changed in found:
        for sizes in sizes_of(num_ranks, **(options | changed)):
            assert sizes.num_envs * sizes.slots_per_env == sizes.batch_size * sizes.num_minibatches


def test_every_combination_of_sizes_either_works_or_is_told_the_nearest_that_do():
    for num_ranks in (1, 2, 3, 4):
        for batch_size in (1, 2, 3, 6, 8):
            for num_envs in range(1, 14):
                options = {"num_envs": num_envs, "batch_size": batch_size, "num_steps": 12, "bptt_steps": 3}
                try:
                    sizes_of(num_ranks, **options)
                except ValueError as error:
                    for changed in proposals(str(error)):
                        sizes_of(num_ranks, **(options | changed))


def test_strata_divide_wherever_the_sizes_are_accepted():
    """`slot_order` asserts it: every rank owns whole strata."""
    accepted = 0
    for num_ranks in (1, 2, 3, 4):
        for slots_per_env in (1, 2, 3, 4, 6):
            for batch_size in (num_ranks, 2 * num_ranks, 3 * num_ranks, 4 * num_ranks):
                for num_envs in range(num_ranks, 30, num_ranks):
                    options = {"num_envs": num_envs, "batch_size": batch_size}
                    options |= {"num_steps": slots_per_env, "bptt_steps": 1}
                    with contextlib.suppress(ValueError):
                        for own in sizes_of(num_ranks, **options):
                            slot_order((1, 1, 0), own.first_env, own.num_envs, slots_per_env, own.num_minibatches)
                            accepted += 1
    assert accepted > 500


@pytest.mark.parametrize("num_ranks", [3, 5, 6, 7, 12])
def test_random_sizes_on_odd_numbers_of_ranks_work_or_every_proposal_does(num_ranks):
    rng, refused, worked = np.random.default_rng(num_ranks), 0, 0
    for _ in range(300):
        slots_per_env = int(rng.integers(1, 13))
        options = {"batch_size": int(rng.integers(1, 200)), "num_envs": int(rng.integers(0, 300) * rng.integers(2))}
        options |= {"num_steps": 8 * slots_per_env, "bptt_steps": 8, "scaling": str(rng.choice(["strong", "weak"]))}
        if rng.random() < 0.5:
            options["batch_size"] *= num_ranks
        try:
            sizes_of(num_ranks, **options)
            worked += 1
        except ValueError as error:
            found = proposals(str(error))
            assert 1 <= len(found) <= 4, error
            refused += 1
            for changed in found:
                for sizes in sizes_of(num_ranks, **(options | changed)):
                    assert sizes.num_envs * sizes.slots_per_env == sizes.batch_size * sizes.num_minibatches > 0
    assert refused > 50 and worked > 10


def test_minibatches_of_all_ranks_together_are_those_of_one_rank():
    """Of random sizes, those that are accepted."""
    rng, checked, strata = np.random.default_rng(5), 0, set()
    while checked < 400:
        num_ranks, slots_per_env = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12])), int(rng.integers(1, 9))
        batch_size, num_envs = (num_ranks * int(rng.integers(1, 7)) for _ in range(2))
        options = {"batch_size": batch_size, "num_envs": num_envs, "num_steps": slots_per_env, "bptt_steps": 1}
        with contextlib.suppress(ValueError):
            ranks, (alone,) = sizes_of(num_ranks, **options), sizes_of(1, **options)
            key = tuple(int(number) for number in rng.integers(0, 100, 3))
            (whole,), shares = global_slots([alone], key), global_slots(ranks, key)
            assert [len(share[0]) for share in shares] == [batch_size // num_ranks] * num_ranks  # equally many
            for minibatch, parts in zip(whole, zip(*shares, strict=True), strict=True):
                assert sorted(np.concatenate(parts)) == sorted(minibatch)
            assert sorted(whole.ravel()) == list(range(num_envs * slots_per_env))  # every slot once
            strata.add(stratum_size(alone.num_minibatches, slots_per_env))
            checked += num_ranks > 1
    assert len(strata) > 4, strata


def global_slots(ranks, key):
    """The numbers, in the whole run, of every rank's slots by minibatch: [num_minibatches, slots] of each rank."""
    found = []
    for own in ranks:
        order = slot_order(key, own.first_env, own.num_envs, own.slots_per_env, own.num_minibatches)
        time, env = np.divmod(order, own.num_envs)
        found.append(time * own.global_num_envs + own.first_env + env)
    return found


def test_other_epochs_iterations_and_seeds_have_other_minibatches():
    orders = [
        global_slots(sizes_of(1, num_envs=8, batch_size=16), key)[0]
        for key in [(1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 0)]
    ]
    assert len({tuple(order.ravel()) for order in orders}) == 4


def resumed_sizes(num_ranks, saved_num_envs, **options):
    config = TrainConfig(**options)
    return [share_out(config, rank, num_ranks, saved_num_envs) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_resumed_weak_run_keeps_the_totals_and_the_learning_rate_it_began_with(num_ranks):
    weak = {"scaling": "weak", "num_envs": 8, "batch_size": 16, "lr_scaling": "linear"}
    begun = sizes_of(4, **weak)[0]
    ranks = resumed_sizes(num_ranks, 32, **weak)
    assert sum(rank.num_envs for rank in ranks) == begun.global_num_envs == 32
    for rank in ranks:
        assert (rank.global_batch_size, rank.num_minibatches) == (begun.global_batch_size, begun.num_minibatches)
        assert rank.learning_rate_factor == begun.learning_rate_factor == 4.0
    if num_ranks == 4:
        assert ranks == sizes_of(4, **weak)


def test_a_resumed_run_that_does_not_divide_is_told_the_nearest_numbers_of_ranks():
    for options, saved in (({}, 64), ({"scaling": "weak", "num_envs": 8, "batch_size": 16}, 32)):
        for num_ranks in (3, 5, 6, 7, 12, 1000):
            with pytest.raises(ValueError, match="environments and batches of .* in all, which do not") as caught:
                resumed_sizes(num_ranks, saved, **options)
            near = [int(number) for number in re.findall(r"--num_gpus (\d+)", str(caught.value))]
            assert near and all(resumed_sizes(number, saved, **options) for number in near)
            for number in range(min(near) + 1, max(near) if len(near) == 2 else 1001):
                with pytest.raises(ValueError):
                    resumed_sizes(number, saved, **options)


def test_a_checkpoint_of_another_number_of_environments_is_no_saved_total():
    for scaling in ("strong", "weak"):
        with pytest.raises(ValueError, match="^the checkpoint holds 17 environments, not "):
            resumed_sizes(1, 17, num_envs=8, batch_size=16, scaling=scaling)


def test_the_learning_rate_grows_with_the_batch_only_where_it_is_asked_to():
    factors = {how: sizes_of(4, scaling="weak", lr_scaling=how)[3].learning_rate_factor for how in LR_SCALINGS}
    assert factors == {"none": 1.0, "sqrt": 2.0, "linear": 4.0}
    assert (
        sizes_of(4)[0].learning_rate_factor
        == sizes_of(1, scaling="weak", lr_scaling="linear")[0].learning_rate_factor
        == 1
    )


def test_lr_scaling_without_weak_scaling_is_refused():
    for how in ("sqrt", "linear"):
        with pytest.raises(ValueError, match=f"^lr_scaling {how} does nothing .* or add --scaling weak"):
            TrainConfig(lr_scaling=how)
    with pytest.raises(ValueError, match="^lr_scaling must be one of none, sqrt, linear, got 'cubic'"):
        TrainConfig(lr_scaling="cubic", scaling="weak")


def test_no_working_number_of_environments_lies_nearer_than_the_proposed_ones():
    def works(num_envs):
        try:
            return bool(sizes_of(2, num_envs=num_envs, batch_size=12, num_steps=12, bptt_steps=2))
        except ValueError:
            return False

    for num_envs in (5, 7, 21, 33):
        with pytest.raises(ValueError) as caught:
            sizes_of(2, num_envs=num_envs, batch_size=12, num_steps=12, bptt_steps=2)
        near = [changed["num_envs"] for changed in proposals(str(caught.value))]
        below = [count for count in range(1, num_envs) if works(count)]
        above = next(count for count in range(num_envs, 1000) if works(count))
        assert near == below[-1:] + [above]


def test_an_error_names_the_field_the_value_and_the_cure():
    with pytest.raises(ValueError, match=r"^num_envs 63 with num_steps 128.* 1 rank: try --num_envs 32 or"):
        sizes_of(1, num_envs=63)
    with pytest.raises(ValueError, match=r"^batch_size 128 does not divide over 3 ranks: try --batch_size 126"):
        sizes_of(3)


def test_a_rollout_must_be_whole_slots_and_the_proposal_is():
    with pytest.raises(ValueError, match="num_steps 100 must be a multiple of bptt_steps 32") as caught:
        TrainConfig(num_steps=100)
    for changed in proposals(str(caught.value)):
        assert changed == {"num_steps": 96}
        TrainConfig(**changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_episodes", 0),
        ("total_steps", -1),
        ("batch_size", -1),
        ("num_envs", -4),
        ("num_steps", 0),
        ("bptt_steps", 0),
        ("seed", -1),
        ("checkpoint_every", 0),
        ("keep_checkpoints", 0),
        ("validate_every", -1),
    ],
)
def test_a_size_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value}"):
        TrainConfig(**{field: value})


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="^scaling must be strong or weak"):
        TrainConfig(scaling="linear")


def test_the_table_says_what_each_rank_and_all_ranks_do():
    config = TrainConfig(num_envs=8, batch_size=16, num_steps=16, bptt_steps=4)
    rows = sizes_table(config, share_out(config, 1, 4), 4, PPOConfig(update_epochs=3)).splitlines()
    assert rows[1].split() == ["environments", "2", "8"]
    assert rows[2].split()[-2:] == ["32", "128"]
    assert rows[3].split()[-2:] == ["4", "16"]
    assert rows[4].split()[-2:] == ["16", "64"]
    assert rows[5].split()[-3:] == ["6", "6", "(together)"]
    assert rows[6] == "  learning rate: 0.0003, falling to 0 over 5000 episodes"


def test_the_table_says_how_the_learning_rate_is_scaled_and_warmed_up():
    config = TrainConfig(num_envs=8, batch_size=16, scaling="weak", lr_scaling="sqrt", total_steps=4096)
    ppo = PPOConfig(learning_rate=1e-3, warmup=5)
    rate = sizes_table(config, share_out(config, 0, 4), 4, ppo).splitlines()[-1]
    scaled = "learning rate: 0.001 x 2 (sqrt of a 4-fold batch) = 0.002"
    assert rate.strip() == f"{scaled}, rising over the first 5 iterations, falling to 0 over 4096 steps"
    resumed = sizes_table(config, share_out(config, 0, 1, 32), 1, PPOConfig(learning_rate=1e-3, anneal_lr=False))
    assert resumed.splitlines()[-1].strip() == scaled  # of a run that four ranks began
