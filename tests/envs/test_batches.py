"""Batches of tensors and arrays that a user's function makes, and native vector environments."""

import json
import logging
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from env_steps import play, same
from fake_batches import LIMIT
from gymnasium import spaces

from envs import make_vector_env
from envs.task import Counts, EvaluationOptions, TaskConfig, TaskSettings, make_task
from envs.vector.adapter import OneByOne, TorchVectorEnv
from envs.vector.guards import EnvironmentFaultError
from rl_dist.files import log_once

SEEDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(autouse=True)
def unlogged():
    """Let `log_once` log again what an earlier test has logged."""
    log_once.cache_clear()


def task_of(name, kwargs="", **options):
    task = TaskConfig(env=f"fake_batches:{name}", env_kwargs=kwargs, **options)
    return make_task(TaskSettings(task=task))


def batch_of(name, kwargs="", env_offset=0, num_envs=6, **options):
    """Make a batch whose episodes start at age 0."""
    env = task_of(name, kwargs, **options).evaluation_env(num_envs, env_offset)
    env.reset(seed=SEEDS[:num_envs])
    return env


def played(env, seeds=SEEDS, num_steps=40):
    """Reset the environments and take random actions; return all outputs."""
    return [env.reset(seed=seeds)[0], *play(env, num_steps)]


@pytest.fixture(scope="module")
def expected():
    """Return what single environments return."""
    return played(make_vector_env("fake_batches:OneWalk", len(SEEDS), vectorization="sync"))


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("Walk", ""),
        ("Walk", '{"final": "final_observation"}'),
        ("NextStep", ""),
        ("arrays", ""),
        ("arrays", '{"autoreset_mode": "SameStep", "seeds": "list"}'),
    ],
)
def test_a_batch_equals_single_environments_bit_for_bit(name, kwargs, expected):
    obs, rewards, terminated, truncated, final_obs = played(batch_of(name, kwargs))[1:]
    assert terminated.any() and (truncated & ~terminated).any()
    assert same([rewards, terminated, truncated], expected[2:5])
    assert torch.equal(obs, expected[1]) and torch.equal(final_obs, expected[5])


@pytest.mark.parametrize("env_id", ["Walk-v0", "MaskWalk-v0", "OnlyWalks-v0"])
def test_a_native_batch_is_used_and_equals_single_environments_bit_for_bit(env_id, expected):
    env = make_vector_env(f"fake_batches:{env_id}", len(SEEDS))
    assert type(env) is TorchVectorEnv and not env.note
    assert same(played(env), expected)


def test_all_parts_of_a_native_batch_are_read(expected):
    env = make_vector_env("fake_batches:GroupWalk-v0", len(SEEDS))
    obs = played(env)[1]
    assert torch.equal(obs, torch.cat([-expected[1], expected[1]], dim=-1))


REASONS = [
    ({"seeds": "one"}, {}, "one seed per environment"),
    ({"masks": False}, {}, "NEXT_STEP"),
    ({"colour": 1}, {}, "TypeError"),
    ({}, {"env_restarts": 1}, "env_restarts"),
]


@pytest.mark.parametrize("kwargs, flags, reason", REASONS)
def test_a_line_says_why_a_native_batch_is_not_used(kwargs, flags, reason):
    env = make_vector_env("fake_batches:MaskWalk-v0", 2, env_kwargs=kwargs, **flags)
    assert isinstance(env, OneByOne) and reason in env.note


@pytest.mark.parametrize("kwargs, flags, reason", REASONS)
def test_an_error_says_why_the_only_batch_cannot_be_used(kwargs, flags, reason):
    with pytest.raises(ValueError, match=f"only a vector version.*{reason}"):
        make_vector_env("fake_batches:OnlyWalks-v0", 2, env_kwargs=kwargs, **flags)


def test_nothing_is_said_if_single_environments_are_wanted():
    assert not make_vector_env("fake_batches:Walk-v0", 2, vectorization="sync").note


# ---- single environments that a class or function makes


def test_a_class_and_a_function_with_a_wrapper_make_single_environments():
    one, wrapped = (
        played(make_vector_env(f"fake_batches:{name}", 3), SEEDS[:3])
        for name in ("OneWalk", "make_walk")
    )
    assert torch.equal(10 * one[2], wrapped[2]) and torch.equal(one[1], wrapped[1])


def test_a_registered_id_wins_over_a_function_of_the_same_name(monkeypatch):
    monkeypatch.setattr("fake_batches.MaskWalk-v0", make_vector_env, raising=False)
    assert type(make_vector_env("fake_batches:MaskWalk-v0", 2)) is TorchVectorEnv


def test_the_step_limit_of_env_kwargs_applies_to_a_function():
    env = make_vector_env("fake_batches:make_walk", 2, env_kwargs={"max_episode_steps": 1})
    env.reset(seed=SEEDS[:2])
    assert play(env, 3)[3].all()


# ---- batches in the form of rsl_rl


def test_groups_that_the_policy_does_not_read_are_named_and_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        env = batch_of("RslWalk")
    assert "critic" in caplog.text and env.layout.describe() == "policy/seen vector[3]"


def test_time_outs_are_truncations_and_other_ends_are_terminations():
    env = batch_of("RslWalk")
    _, _, terminated, truncated, _ = play(env, 60)
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()
    ages = [0] * env.num_envs
    for ended, cut in zip((terminated | truncated).tolist(), truncated.tolist(), strict=True):
        ages = [age + 1 for age in ages]
        assert all(age == LIMIT for age, is_cut in zip(ages, cut, strict=True) if is_cut)
        ages = [0 if has_ended else age for age, has_ended in zip(ages, ended, strict=True)]


def test_columns_and_an_info_that_is_not_a_dict_mean_the_same_as_rows_and_a_dict():
    expected = played(batch_of("Walk"))
    obs, rewards, terminated, truncated, final_obs = played(batch_of("ColumnWalk"))[1:]
    assert same([obs, rewards, final_obs], [*expected[1:3], expected[5]])
    assert torch.equal(truncated, expected[4]) and torch.equal(
        terminated, expected[3] & ~expected[4]
    )


def test_a_missing_last_observation_is_the_one_before_the_step_and_a_line_says_so(caplog):
    env = batch_of("RslWalk")
    before = env.rows
    for t in range(30):  # left and right by turns, so that some walks reach the time limit
        obs, _, terminated, truncated, info = env.step(torch.full((env.num_envs, 1), (-1.0) ** t))
        ended = (terminated | truncated)[:, None]
        assert torch.equal(info["final_obs"], torch.where(ended, before, obs))
        before = obs
    with caplog.at_level(logging.WARNING):
        env.check()
    assert "no last observations" in caplog.text


def test_a_batch_without_seeds_is_seeded_through_the_global_generators():
    first, again = (batch_of("RslWalk").rows for _ in range(2))
    assert torch.equal(first, again)
    other = batch_of("RslWalk", env_offset=6)
    assert not torch.equal(first, other.reset(seed=[99] * 6)[0])


def test_spaces_of_other_libraries_are_used_as_meant():
    kinds = {"n": 3, "shape": []}, {"nvec": [2, 3], "shape": [2]}, {"shape": [2]}
    box = {"shape": [2], "low": -3.0, "high": [3.0, 5.0]}
    found = [batch_of("with_actions", json.dumps(kind)).decoder.target for kind in (*kinds, box)]
    assert found == [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(np.array([-3, -3], np.float32), np.array([3, 5], np.float32)),
    ]


def test_a_batch_without_reset_is_used_and_a_line_warns_of_short_test_episodes(caplog):
    with caplog.at_level(logging.WARNING):
        assert play(batch_of("unreset"), 20)[3].any()
    assert "no reset" in caplog.text


def test_a_state_that_is_not_a_dict_is_no_snapshot():
    assert batch_of("Walk").can_snapshot and not batch_of("simulator_state").can_snapshot


def test_a_wrapped_reset_gets_the_seeds():
    env = batch_of("ColumnWalk")
    assert torch.equal(env.reset(seed=SEEDS)[0], batch_of("Walk").reset(seed=SEEDS)[0])


# ---- outputs that a batch may not return


def changed(outputs, maker="Walk"):
    """Make a batch whose `step` returns other outputs, given as a Python expression."""
    return batch_of("changed", json.dumps({"outputs": outputs, "maker": maker}))


@pytest.mark.parametrize(
    "outputs, problem",
    [
        ("obs, torch.stack([rewards, rewards]), terminated, truncated, info", "rewards.*[2, 6]"),
        ("obs, 1.0, terminated, truncated, info", "rewards of shape []"),
        ("obs, rewards, terminated[1:], truncated, info", "end flag of shape [5], not [6]"),
        ("obs, rewards, terminated", "3 values"),
        ("obs, rewards, terminated, truncated, {'final_obs': obs[:, 1:]}", "final.*[6, 2], not"),
    ],
)
def test_an_output_of_another_shape_is_refused_by_name(outputs, problem):
    pattern = problem.replace("[", r"\[")
    with pytest.raises(EnvironmentFaultError, match=pattern):
        play(changed(outputs), 20)


def test_outputs_may_be_arrays_beside_tensors(expected):
    final = "{'final_obs': info['final_obs'].numpy()}"
    mixed = f"obs, rewards.numpy(), terminated.numpy(), truncated, {final}"
    assert same(played(changed(mixed)), expected)


@pytest.mark.parametrize("maker", ["Walk", "SameStepArrays"])
def test_flags_with_other_values_than_0_and_1_are_refused(maker):
    env = changed("obs, terminated, rewards, truncated, info", maker)
    play(env, 20)
    with pytest.raises(EnvironmentFaultError, match="an end flag is neither 0 nor 1"):
        env.check()


@pytest.mark.parametrize("maker", ["Walk", "SameStepArrays"])
@pytest.mark.parametrize(
    "outputs, line",
    [
        ("obs, rewards, terminated | truncated, {}", "no time_outs"),
        ("[*info.values()][-1], rewards, terminated, truncated, info", "does it reset"),
        ("obs, rewards, terminated, truncated, info", ""),
    ],
)
def test_a_line_says_what_a_batch_seems_to_forget(outputs, line, maker, caplog):
    env = changed(outputs, maker)
    with caplog.at_level(logging.WARNING):
        play(env, 20)
        env.check()
    assert line in caplog.text and bool(line) == bool(caplog.text)


def test_the_graph_of_a_differentiable_simulator_is_not_kept():
    grows = "*(out.clone().requires_grad_() for out in (obs, rewards)), terminated, truncated, info"
    assert not any(values.requires_grad for values in played(changed(grows)))


def test_a_line_says_how_a_batch_of_arrays_without_a_mode_is_read(caplog):
    with caplog.at_level(logging.WARNING):
        batch_of("with_attributes", '{"metadata": {}}')
    assert "SAME_STEP" in caplog.text


# ---- values


def test_last_observations_are_read_only_where_an_episode_ended_and_need_no_mask():
    env = batch_of("PartWalk")
    *_, final_obs = play(env, 40)
    env.check()
    assert torch.equal(final_obs.sum(-1), torch.full_like(final_obs[..., 0], 3.0))


@pytest.mark.parametrize("first", [0.3, -torch.inf])
def test_a_mask_with_other_numbers_than_0_and_1_is_refused(first):
    env = batch_of("mask_of", json.dumps({"first": first}))
    with pytest.raises(EnvironmentFaultError, match="mask"):
        env.check()


def test_pixels_that_are_floats_or_too_large_are_refused():
    with pytest.raises(EnvironmentFaultError, match="float32"):
        batch_of("pixels", '{"dtype": "float32", "value": 0.5}')
    env = batch_of("pixels", '{"dtype": "int64", "value": 300}')
    with pytest.raises(EnvironmentFaultError, match="outside its space"):
        env.check()


def test_a_value_that_is_not_finite_is_named_once_per_iteration():
    env = batch_of("Walk", '{"nan_at": 4}', env_offset=10)
    play(env, 3)
    env.check()
    play(env, 3, first=3)
    with pytest.raises(EnvironmentFaultError, match="Walk number 12 at its step 4: reward is NaN"):
        env.check()


def test_the_time_limit_applies_from_the_second_step_on():
    play(batch_of("slow", '{"at": 1}', env_timeout=0.1), 2)  # the first step may compile kernels
    env = batch_of("slow", '{"at": 2}', env_timeout=0.1)
    with pytest.raises(EnvironmentFaultError, match="fake_batches:slow number 0..5 .*0.1 s"):
        play(env, 2)


def test_logged_numbers_become_metrics_that_are_reset():
    env = batch_of("Walk")
    _, _, terminated, _, _ = play(env, 20)
    metrics = env.take_metrics()
    assert metrics.keys() == {"/far", "walks"} and metrics["walks"] == (40.0, 20)
    assert metrics["/far"][0] == pytest.approx(float(terminated.double().mean(1).sum()))
    assert env.take_metrics() == {}


def test_training_spreads_the_ages_of_the_first_episodes_and_a_test_does_not():
    env = task_of("Walk").training_env(64)
    env.reset(seed=list(range(64)))
    ages = env.env.episode_length_buf
    assert set(ages.tolist()) == set(range(LIMIT))
    env.spreads = False
    env.reset(seed=list(range(64)))
    assert not env.env.episode_length_buf.any()


# ---- the task


def test_the_episodes_of_the_final_test_take_turns_in_the_batch_of_the_training():
    task = task_of("Walk", eval_episodes=14)
    trained = task.training_env(6)
    trial = task.tests({"policy": None}, options := EvaluationOptions(
        seeds=lambda first, count: list(range(first, first + count)),
        counts=Counts(global_step=0, episodes=0), directory=None, writes=False,
    ))["episodes"]  # fmt: skip

    def still(env, obs, start):
        return torch.zeros(env.num_envs, dtype=torch.int64)

    single = make_task(TaskSettings(task=replace(task.settings.task, env="fake_batches:OneWalk")))
    expected = single.tests({"policy": None}, options)["episodes"].run(still, range(14))
    with mock.patch.object(trained, "close", side_effect=AssertionError):
        assert trial.run(still, range(14)) == expected
    assert task.made == [trained] and task.validation(None, None) is None
    with mock.patch.object(trained, "close") as close:
        for _ in range(2):
            task.close()
    close.assert_called_once_with()


@pytest.mark.parametrize("flag", ["env_workers", "env_restarts", "info_mask", "previous_action"])
def test_flags_that_need_single_environments_are_refused_by_name(flag):
    with pytest.raises(ValueError, match=flag):
        task_of("Walk", **{flag: 1})


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("foreign", "", "builtins.float.*torch.from_dlpack"),
        ("arrays", '{"masks": false}', "NEXT_STEP.*reset_mask"),
        ("short", "", "5 rows, not num_envs 6"),
        ("legal", "", "'legal' looks like a mask"),
        ("deaf", "", "NEXT_STEP.*reset_mask"),
        # as in PufferLib
        ("with_attributes", '{"metadata": {}, "emulated": {"a": 1}, "masks": 0}', "NEXT_STEP"),
        ("nested_actions", "", "plain actions"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused_in_one_line(name, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        batch_of(name, kwargs)
    assert "\n" not in str(error.value)
