"""Environments that fail: named, made again, and waited for only as long as they may take."""

import os
import pickle
import signal
import time
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch

from agents.network.seeds import ENVIRONMENT_STREAM, stream_seeds
from envs import make_vector_env
from envs.vector import guards
from envs.vector.adapter import TorchVectorEnv
from envs.vector.guards import EnvironmentFaultError


class Ticking(gymnasium.Env):
    """Observes its age; in its third step it returns, or does, something else."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, third=None):
        self.third = third

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.age += 1
        step = np.full(1, self.age, np.float32), 1.0, False, self.age == 5, {}
        return self.third(step) if self.third and self.age == 3 else step


def ticking(make, **guard):
    """Numbers 4 and 5 of a run; `make` makes the second."""
    envs = [Ticking(), make()]
    env = TorchVectorEnv(envs, make=make, env_id="Ticking-v0", env_offset=4, **guard)
    env.reset(seed=[70, 80])
    return env


def play(env, num_steps):
    """Columns obs, rewards, terminated, truncated, final_obs [num_steps, B, ...] of one action."""
    actions = torch.zeros(env.num_envs, dtype=torch.int64)
    steps = [env.step(actions) for _ in range(num_steps)]
    return [
        torch.stack(column)
        for column in zip(*((*step[:4], step[4]["final_obs"]) for step in steps), strict=True)
    ]


def misbehaving(misdeeds, num_envs=2, **guard):
    kwargs = {"misdeeds": misdeeds, "at": 3}
    env_id = "misbehaving_envs:Misbehaving-v0"
    return make_vector_env(env_id, num_envs, env_kwargs=kwargs, **guard)


def test_an_environment_is_made_again_as_often_as_allowed():
    env = misbehaving({0: "raise", 1: "nan"}, env_restarts=2)
    for restarts in (1, 2):
        env.reset(seed=stream_seeds(1, ENVIRONMENT_STREAM, 0, 2))
        before = play(env, 2)[0][-1]
        obs, rewards, terminated, truncated, final_obs = play(env, 1)
        assert env.restarts == [restarts, restarts]
        assert truncated.all() and not terminated.any() and not rewards.any()
        assert torch.equal(final_obs[0], before) and not obs.any()
    env.reset(seed=stream_seeds(1, ENVIRONMENT_STREAM, 0, 2))
    with pytest.raises(
        EnvironmentFaultError, match=r"number 0 at its step 3: raised KeyError.* \(after 2 restarts"
    ):
        play(env, 3)


@pytest.mark.parametrize(
    ("third", "problem"),
    [
        (lambda step: {}["no such\n price"], r"raised KeyError: 'no such\\n price'"),
        (lambda step: (np.full(1, np.nan), *step[1:]), "observation is nan"),
        (lambda step: ([None], *step[1:]), "observation has type object, not float32"),
        (lambda step: (np.zeros(3), *step[1:]), r"observation has shape \(3,\), not \(1,\)"),
        (lambda step: step[:4], "raised ValueError: not enough values"),
        (lambda step: (step[0], "much", *step[2:]), "raised ValueError: could not convert"),
        (lambda step: (step[0], None, *step[2:]), "reward is nan"),
        (lambda step: ([0.0, [1.0, 2.0]], *step[1:]), "raised ValueError: setting an array"),
        (lambda step: (step[0], -1e300, *step[2:]), r"reward is -1e\+300"),
        (lambda step: (np.full(1, 1e39), *step[1:]), r"observation is inf"),
        (lambda step: (*step[:2], "False", *step[3:]), "terminated is 'False', neither true"),
        (lambda step: (*step[:3], None, step[4]), "truncated is None, neither"),
        (lambda step: (*step[:4], [1]), "raised AttributeError"),
    ],
)
def test_a_step_that_is_none_is_named_by_its_environment_and_begins_again(third, problem):
    named = f"environment Ticking-v0 number 5 at its step 3: {problem}"
    with pytest.raises(EnvironmentFaultError, match=named) as fault:
        play(ticking(lambda: Ticking(third)), 3)
    assert "\n" not in str(fault.value)
    assert str(pickle.loads(pickle.dumps(fault.value))) == str(fault.value)
    env = ticking(lambda: Ticking(third), env_restarts=1)
    assert play(env, 3)[3].tolist() == [[False, False], [False, False], [False, True]]
    assert env.restarts == [0, 1]


@pytest.mark.parametrize("flag", [np.False_, 0, np.zeros(1, bool)])
def test_truth_values_may_be_numbers_rewards_arrays_of_one_and_infos_differ(flag):
    infos = iter([{}, {"a": "text"}, {"a": np.zeros(2), 3: None}])
    one = np.full(1, 0.5, np.float32)
    env = ticking(lambda: Ticking(lambda step: (step[0], one, flag, flag, next(infos))))
    assert play(env, 3)[1].tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.5]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("native", [False, True])
def test_whatever_an_environment_raises_is_its_fault(error, native):
    def fail(*_):
        raise error

    before = signal.signal(signal.SIGINT, lambda signum, frame: None)  # as in training
    try:
        env = make_vector_env("Recall-v0", 2) if native else ticking(lambda: Ticking(fail))
        env.reset()
        number = "one of 0..1 at its step 1" if native else "5 at its step 3"
        with pytest.raises(
            EnvironmentFaultError, match=f"number {number}: raised {error.__name__}"
        ):
            if native:
                env.env.step = fail
            play(env, 3)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_users_interrupt_is_no_fault_of_an_environment():
    def interrupt(step):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(ticking(lambda: Ticking(interrupt)), 3)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (1, np.array(["a", "b"]), "could not convert"),
        (3, np.array([False]), "cannot reshape"),
        (1, np.array([1.0, 2e30]), r"number 1 at its step 1: reward is 2e\+30"),
    ],
)
def test_what_a_native_batch_returns_is_looked_at_too(place, value, problem):
    env = make_vector_env("Recall-v0", 2)
    env.reset()
    good = env.env.step(np.zeros(2, np.int64))
    env.env.step = lambda actions: (*good[:place], value, *good[place + 1 :])
    with pytest.raises(EnvironmentFaultError, match=problem):
        play(env, 1)


@pytest.mark.parametrize("native", [False, True])
def test_an_environment_that_closes_the_files_of_others_ends_the_process_at_once(native):
    def close(*_):
        os.close(guards._sentinel())

    def end(message):  # in the place of os._exit
        guards._sentinel.cache_clear()
        raise guards.Interruption(message)

    make = lambda: Ticking(close)  # noqa: E731
    env = make_vector_env("Recall-v0", 2, end=end) if native else ticking(make, end=end)
    env.reset()
    with pytest.raises(guards.Interruption, match="at its step [13]: closed files and connections"):
        if native:
            env.env.step = close
        play(env, 3)


@pytest.mark.parametrize("failure", [lambda self: 1 / 0, lambda self: time.sleep(60)])
def test_an_environment_that_does_not_close_is_named_and_waited_for_no_longer(failure, caplog):
    env = ticking(type("Unclosing", (Ticking,), {"close": failure}), env_timeout=0.3)
    env.close()
    assert "Ticking-v0 number 5 at its step 0: " in caplog.text
    assert ", when it was closed" in caplog.text


@pytest.mark.parametrize("restarts", [2, 3])
def test_a_fault_while_an_environment_is_made_again_is_one_of_its_restarts(restarts, caplog):
    made = []

    def make():  # one that raises in its third step, one that cannot be made, one that hangs
        made.append(1)
        if len(made) == 2:
            raise OSError("no licence")
        if len(made) == 3:
            time.sleep(60)
        return Ticking((lambda step: 1 / 0) if len(made) == 1 else None)

    env = ticking(make, env_timeout=0.3, env_restarts=restarts)
    if restarts == 2:
        problem = r"5 at its step 3: could not be made again: .* \(after 2 restarts, --env_restarts"
        with pytest.raises(EnvironmentFaultError, match=problem):
            play(env, 3)
        env.close()
        return
    _, rewards, terminated, truncated, _ = play(env, 5)
    assert env.restarts == [0, 3] and not terminated.any()
    assert truncated[:, 1].tolist() == [False, False, True, False, False]
    assert rewards[:, 1].tolist() == [1, 1, 0, 1, 1]
    assert caplog.text.count("number 5 at its step 3: could not be made again: ") == 2
    env.close()


def test_every_call_into_an_environment_and_every_making_says_that_work_goes_on():
    beats = []
    env = misbehaving({0: "raise"}, num_envs=3, env_restarts=1, heartbeat=lambda: beats.append(1))
    assert len(beats) == 3  # made
    env.reset(seed=stream_seeds(1, ENVIRONMENT_STREAM, 0, 3))
    play(env, 2)
    assert len(beats) == 3 + 3 + 2 * 3
    play(env, 1)  # the first is closed, made and reset
    assert len(beats) >= 3 + 3 + 3 * 3 + 3


@pytest.mark.parametrize("batched", [False, True])
def test_a_long_call_says_that_work_goes_on_as_long_as_it_may_take(batched):
    beats = []
    guard = {"env_timeout": 1.0, "heartbeat": lambda: beats.append(time.monotonic())}
    vectorization = "auto" if batched else "sync"
    env = make_vector_env("Recall-v0", 1, vectorization=vectorization, **guard)
    env.reset()
    hanging = env.env if batched else env.guards[0].env
    number = "one of 0..0" if batched else "0"
    with mock.patch.object(hanging, "step", lambda actions: time.sleep(60)):
        started_s = time.monotonic()
        problem = f"number {number} at its step 1: did not come back within 1 s"
        with pytest.raises(EnvironmentFaultError, match=problem):
            play(env, 1)
    assert len([at for at in beats if at > started_s]) > 5
    count = len(beats)
    time.sleep(0.5)
    assert len(beats) <= count + 1  # silent between calls
    env.close()


def test_an_alarm_of_others_reaches_them_while_environments_are_watched():
    arrived = []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: arrived.append(signum))
    try:
        env = make_vector_env("Recall-v0", 1, env_timeout=60.0)
        signal.raise_signal(signal.SIGALRM)
        env.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert arrived == [signal.SIGALRM]
