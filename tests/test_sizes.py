import contextlib
import re

import pytest

from agents.rollout import slot_order
from agents.sizes import Sizes, TrainConfig, share_out, sizes_table


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
        ("batch_size", 0),
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
    rows = sizes_table(config, share_out(config, 1, 4), 4, update_epochs=3).splitlines()
    assert rows[1].split() == ["environments", "2", "8"]
    assert rows[2].split()[-2:] == ["32", "128"]
    assert rows[3].split()[-2:] == ["4", "16"]
    assert rows[4].split()[-3:] == ["6", "6", "(together)"]
