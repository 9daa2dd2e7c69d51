"""Environments stepped one by one: results, reported faults and restarts."""

import pickle
import signal
import time

import gymnasium
import numpy as np
import pytest
from env_steps import play

from envs import make_vector_env
from envs.vector.adapter import OneByOne
from envs.vector.guards import EnvironmentFaultError


class Ticking(gymnasium.Env):
    """Environment whose observation is its step count; `third` changes step 3."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, third=None):
        self.third = third

    def reset(self, *, seed=None, options=None):
        self.age, self.seed = 0, seed
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.age += 1
        step = np.full(1, self.age, np.float32), 1.0, False, self.age == 5, {}
        return self.third(step) if self.third and self.age == 3 else step


class UnprintableError(Exception):
    """An exception whose message cannot be formatted."""

    def __str__(self):
        return self.missing


def ticking(make, **options):
    """Return a batch of environments 4 and 5; `make` creates environment 5."""
    env = OneByOne([Ticking(), make()], make=make, env_id="Ticking-v0", env_offset=4, **options)
    env.reset(seed=[70, 80])
    return env


def failing(third, **options):
    """Return a batch of environments 4 and 5; environment 5 calls `third` in step 3."""
    return ticking(lambda: Ticking(third), **options)


def raises(error):
    def third(step):
        raise error

    return third


def returns(place, value):
    return lambda step: (*step[:place], value, *step[place + 1 :])


def test_metrics_that_are_not_finite_numbers_are_skipped():
    odd = {"name": "left", "three": np.zeros(3), "ratio": np.inf}
    good = {"won": np.bool_(True), "lives": np.int64(3), "health": np.array(0.5)}
    env = failing(returns(4, {"metrics": odd | good}))
    for _ in range(2):
        play(env, 3)
        env.reset(seed=[70, 80])
    assert env.take_metrics() == {"won": (2.0, 2), "lives": (6.0, 2), "health": (1.0, 2)}
    assert env.take_metrics() == {}


BAD_STEPS = [  # (third step, the error)
    (raises(KeyError("no such\n price")), r"raised KeyError: 'no such\\n price' \(test_guard"),
    (raises(SystemExit()), "raised SystemExit"),
    (raises(UnprintableError()), "raised UnprintableError"),
    (returns(0, np.full(1, np.nan)), "observation is nan"),
    (returns(0, np.zeros(3)), r"observation has shape \(3,\), not \(1,\)"),
    (returns(0, np.full(1, 1e39)), "observation is inf"),
    (returns(1, None), "reward is nan"),
    (lambda step: step[:4], "raised ValueError: not enough values"),
]


@pytest.mark.parametrize("third, problem", BAD_STEPS)
def test_a_bad_step_is_one_line_that_names_its_environment(third, problem):
    with pytest.raises(EnvironmentFaultError, match=problem) as fault:
        play(failing(third), 3)
    assert str(fault.value).startswith("environment Ticking-v0 number 5 at its step 3: ")
    assert "\n" not in str(fault.value)
    # A worker sends the error to its rank.
    assert str(pickle.loads(pickle.dumps(fault.value))) == str(fault.value)


@pytest.fixture(params=[third for third, _ in BAD_STEPS])
def restarting(request):
    """Return environments of which the second may restart twice after its third step."""
    return failing(request.param, env_restarts=2)


def test_a_restart_truncates_the_episode_before_the_bad_step(restarting):
    obs, rewards, terminated, truncated, final_obs = play(restarting, 3)
    assert truncated.nonzero().tolist() == [[2, 1]] and not terminated.any()
    assert rewards[2].tolist() == [1.0, 0.0]
    assert obs[2].tolist() == [[3.0], [0.0]] and final_obs[2].tolist() == [[3.0], [2.0]]


def test_a_restart_draws_new_episodes(restarting):
    seeds = {80}
    for restarts in (1, 2):
        play(restarting, 3)
        seeds.add(restarting.env[1].seed)
        assert len(seeds) == 1 + restarts
        restarting.reset(seed=[70, 80])
    assert max(seeds) < 2**31  # many environments accept no larger seeds


def test_restarts_are_counted_and_limited(restarting):
    for restarts in (1, 2):
        play(restarting, 3)
        assert restarting.restarts == [0, restarts]
        restarting.reset(seed=[70, 80])
    with pytest.raises(EnvironmentFaultError, match=r"\(after 2 restarts, --env_restarts"):
        play(restarting, 3)


@pytest.mark.parametrize(
    "third, problem",
    [
        (raises(KeyError()), r"0..1 \(one of these\) at its step 1: raised KeyError"),
        (returns(3, np.array([False])), "0..1 .one of these. .* cannot reshape"),
        (returns(1, np.array([1.0, 2e30])), r"number 1 at its step 1: reward is 2e\+30"),
    ],
)
def test_a_bad_step_of_a_batch_is_named_too(third, problem):
    env = make_vector_env("Recall-v0", 2)
    env.reset(seed=[0, 1])
    good = env.env.step(np.zeros(2, np.int64))
    env.env.step = lambda actions: third(good)
    with pytest.raises(EnvironmentFaultError, match=problem):
        play(env, 1)


@pytest.mark.parametrize(
    # The first handler is like the one that training sets; the second is Python's default.
    "handler, error",
    [
        (lambda signum, frame: None, EnvironmentFaultError),
        (signal.default_int_handler, KeyboardInterrupt),
    ],
)
def test_an_interrupt_is_a_fault_of_the_environment_unless_the_user_sent_it(handler, error):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(error):
            play(failing(raises(KeyboardInterrupt())), 3)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("failure", [lambda self: 1 / 0, lambda self: time.sleep(60)])
def test_an_environment_that_does_not_close_is_named_and_abandoned(failure, caplog):
    env = ticking(type("Unclosing", (Ticking,), {"close": failure}), env_timeout=0.3)
    env.close()
    assert "Ticking-v0 number 5 at its step 0: " in caplog.text


def rebuilt(restarts):
    """Return environments of which the second fails 3 times.

    It raises an error in step 3, then it cannot be made, then it hangs while it is made.
    """
    makers = iter(
        [
            lambda: Ticking(raises(KeyError())),
            lambda: 1 / 0,
            lambda: time.sleep(60),
            Ticking,
        ]
    )
    return ticking(lambda: next(makers)(), env_timeout=0.3, env_restarts=restarts)


def test_faults_while_an_environment_is_rebuilt_use_up_the_restarts():
    env = rebuilt(2)
    with pytest.raises(EnvironmentFaultError, match=r"5 at its step 3: .* \(after 2 restarts"):
        play(env, 3)
    env.close()


def test_an_environment_is_rebuilt_until_that_succeeds(caplog):
    env = rebuilt(3)
    _, rewards, terminated, truncated, _ = play(env, 5)
    assert env.restarts == [0, 3] and not terminated.any()
    assert truncated.nonzero().tolist() == [[2, 1], [4, 0]]
    assert rewards[:, 1].tolist() == [1, 1, 0, 1, 1]
    assert caplog.text.count("number 5 at its step 3: ") == 3
    env.close()


def test_every_call_to_an_environment_and_every_creation_reports_progress():
    beats = []
    env = make_vector_env("Pendulum-v1", 3, heartbeat=lambda: beats.append(1))
    env.reset(seed=[1, 2, 3])
    play(env, 2)
    assert len(beats) == 3 + 3 + 2 * 3


def test_a_hanging_call_reports_progress_until_its_timeout():
    arrived, beats = [], []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: arrived.append(signum))
    options = {"env_timeout": 1.0, "heartbeat": lambda: beats.append(1)}
    env = failing(lambda step: time.sleep(60), **options)
    signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)
    assert arrived == [signal.SIGALRM]  # an alarm set by other code reaches that code's handler
    play(env, 2)
    count = len(beats)
    with pytest.raises(EnvironmentFaultError, match="5 at its step 3: did not come back"):
        play(env, 1)
    assert len(beats) > count + 5
    count = len(beats)
    time.sleep(0.5)
    assert len(beats) <= count + 1  # no heartbeats between calls
    env.close()
