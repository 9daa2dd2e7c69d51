"""Environments stepped one by one: results, reported faults and restarts."""

import os
import pickle
import signal
import time

import gymnasium
import numpy as np
import pytest
import torch

from envs import make_vector_env
from envs.vector import adapter, guards
from envs.vector.guards import EnvironmentFaultError
from envs.vector.one_by_one import OneByOne


class Ticking(gymnasium.Env):
    """Observes its age; `third(result)` may replace its third result or misbehave."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, third=None):
        self.third = third

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.seed = 0, seed
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.age += 1
        step = np.full(1, self.age, np.float32), 1.0, False, self.age == 5, {}
        return self.third(step) if self.third and self.age == 3 else step


def ticking(make, **options):
    """Return environments 4 and 5 of a run; `make` creates number 5."""
    env = OneByOne([Ticking(), make()], make=make, env_id="Ticking-v0", env_offset=4, **options)
    env.reset(seed=[70, 80])
    return env


def failing(way, third, **options):
    """Return environments whose third step fails, and the name in the error."""
    if way == "one by one":
        return ticking(lambda: Ticking(third), **options), "5 at its step 3"
    env = make_vector_env("Recall-v0", 2, **options)
    env.reset()
    play(env, 2)
    good = env.env.step(np.zeros(2, np.int64))
    env.env.step = lambda actions: third(good)
    return env, "one of 0..1 at its step 3"


WAYS = pytest.mark.parametrize("way", ["one by one", "batch"])


def play(env, num_steps):
    """Run steps and stack their outputs to tensors [num_steps, B, ...].

    The outputs are obs, rewards, terminated, truncated and final_obs.
    """
    actions = torch.zeros(env.num_envs, dtype=torch.int64)
    steps = [env.step(actions) for _ in range(num_steps)]
    columns = zip(*((*step[:4], step[4]["final_obs"]) for step in steps), strict=True)
    return [torch.stack(column) for column in columns]


def raises(error):
    def third(step):
        raise error

    return third


def returns(place, value):
    return lambda step: (*step[:place], value, *step[place + 1 :])


@pytest.mark.parametrize("place", [2, 3])
def test_final_obs_is_the_last_observation_of_an_episode(place):
    env, _ = failing("one by one", returns(place, True))
    obs, rewards, *ends, final_obs = play(env, 3)
    assert final_obs[2, :, 0].tolist() == [3.0, 3.0] and obs[2, :, 0].tolist() == [3.0, 0.0]
    assert rewards[2].tolist() == [1.0, 1.0]
    assert [end[2].tolist() for end in ends] == [[False, place == 2], [False, place == 3]]
    assert not ends[0][:2].any() and not ends[1][:2].any()


def test_metrics_that_are_not_finite_numbers_are_skipped_and_reported_once(caplog):
    adapter.warn_once.cache_clear()
    odd = {"name": "left", "three": np.zeros(3), "none": None, "ratio": np.inf}
    env, _ = failing("one by one", returns(4, {"metrics": odd | {"won": True, "level": 0.5}}))
    for _ in range(2):
        play(env, 3)
        env.reset()
    assert env.take_metrics() == {"won": (2.0, 2), "level": (1.0, 2)}
    assert env.take_metrics() == {}
    for name in odd:
        assert sum(f"['{name}']" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("third", "problem"),
    [
        (raises(KeyError("no such\n price")), r"raised KeyError: 'no such\\n price' \(test_guard"),
        (returns(0, np.full(1, np.nan)), "observation is nan"),
        (returns(0, np.zeros(3)), r"observation has shape \(3,\), not \(1,\)"),
        (returns(0, np.full(1, 1e39)), "observation is inf"),
        (returns(1, None), "reward is nan"),
        (returns(1, -1e300), r"reward is -1e\+300"),
        (lambda step: step[:4], "raised ValueError: not enough values"),
    ],
)
def test_a_bad_step_is_named_by_its_environment_or_begins_again(third, problem):
    env, number = failing("one by one", third)
    with pytest.raises(EnvironmentFaultError, match=problem) as fault:
        play(env, 3)
    assert str(fault.value).startswith(f"environment Ticking-v0 number {number}: ")
    assert "\n" not in str(fault.value)
    assert str(pickle.loads(pickle.dumps(fault.value))) == str(fault.value)
    env, _ = failing("one by one", third, env_restarts=2)
    seeds = {80}
    for restarts in (1, 2):
        obs, rewards, terminated, truncated, final_obs = play(env, 3)
        assert truncated.tolist() == [[False, False], [False, False], [False, True]]
        assert rewards[2].tolist() == [1.0, 0.0] and not terminated.any()
        assert obs[2].tolist() == [[3.0], [0.0]] and final_obs[2].tolist() == [[3.0], [2.0]]
        seeds.add(env.env[1].seed)  # a restart draws new episodes
        assert env.restarts == [0, restarts] and len(seeds) == 1 + restarts
        env.reset(seed=[70, 80])
    with pytest.raises(EnvironmentFaultError, match=r"\(after 2 restarts, --env_restarts"):
        play(env, 3)


@pytest.mark.parametrize(
    ("third", "problem"),
    [
        (returns(3, np.array([False])), "one of 0..1 .* cannot reshape"),
        (returns(1, np.array([1.0, 2e30])), r"number 1 at its step 3: reward is 2e\+30"),
    ],
)
def test_a_bad_step_of_a_batch_is_named_too(third, problem):
    with pytest.raises(EnvironmentFaultError, match=problem):
        play(failing("batch", third)[0], 1)


@WAYS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_any_exception_of_an_environment_is_its_fault_but_a_users_interrupt(error, way):
    handlers = [lambda signum, frame: None, signal.default_int_handler]
    before = signal.getsignal(signal.SIGINT)
    try:
        # training installs its own handler; other programs keep the default one
        for handler in handlers:
            signal.signal(signal.SIGINT, handler)
            env, number = failing(way, raises(error))
            is_users = isinstance(error, KeyboardInterrupt) and handler is handlers[1]
            kind = KeyboardInterrupt if is_users else EnvironmentFaultError
            named = None if is_users else f"{number}: raised {type(error).__name__}"
            with pytest.raises(kind, match=named):
                play(env, 3)
    finally:
        signal.signal(signal.SIGINT, before)


@WAYS
def test_an_environment_that_closes_the_files_of_others_ends_the_process(way):
    def end(message):  # called instead of os._exit
        guards._sentinel.cache_clear()
        raise guards.Interruption(message)

    env, number = failing(way, lambda step: os.close(guards._sentinel()), end=end)
    with pytest.raises(guards.Interruption, match=f"{number}: closed files and connections"):
        play(env, 3)


@pytest.mark.parametrize("failure", [lambda self: 1 / 0, lambda self: time.sleep(60)])
def test_an_environment_that_does_not_close_is_named_and_waited_for_no_longer(failure, caplog):
    env = ticking(type("Unclosing", (Ticking,), {"close": failure}), env_timeout=0.3)
    env.close()
    assert "Ticking-v0 number 5 at its step 0: " in caplog.text


@pytest.mark.parametrize("restarts", [2, 3])
def test_a_fault_while_an_environment_is_made_again_is_one_of_its_restarts(restarts, caplog):
    made = []

    # the first environment raises in step 3, the second cannot be made, the third one hangs
    def make():
        made.append(1)
        if len(made) == 2:
            raise OSError("no licence")
        if len(made) == 3:
            time.sleep(60)
        return Ticking(raises(KeyError()) if len(made) == 1 else None)

    env = ticking(make, env_timeout=0.3, env_restarts=restarts)
    if restarts == 2:
        with pytest.raises(EnvironmentFaultError, match=r"5 at its step 3: .* \(after 2 restarts"):
            play(env, 3)
    else:
        _, rewards, terminated, truncated, _ = play(env, 5)
        assert env.restarts == [0, 3] and not terminated.any()
        assert truncated[:, 1].tolist() == [False, False, True, False, False]
        assert rewards[:, 1].tolist() == [1, 1, 0, 1, 1]
        assert caplog.text.count("number 5 at its step 3: ") == 3
    env.close()


def test_every_call_into_an_environment_and_every_making_reports_progress():
    beats = []
    options = {"vectorization": "sync", "heartbeat": lambda: beats.append(1)}
    env = make_vector_env("Recall-v0", 3, **options)
    assert len(beats) == 3  # one heartbeat per environment that is created
    env.reset(seed=[1, 2, 3])
    play(env, 2)
    assert len(beats) == 3 + 3 + 2 * 3


@WAYS
def test_a_hanging_call_reports_progress_until_its_time_is_over(way):
    arrived, beats = [], []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: arrived.append(signum))
    options = {"env_timeout": 1.0, "heartbeat": lambda: beats.append(time.monotonic())}
    env, number = failing(way, lambda step: time.sleep(60), **options)
    signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)
    assert arrived == [signal.SIGALRM]  # alarms from other code reach its own handler
    started_s = time.monotonic()
    with pytest.raises(EnvironmentFaultError, match=f"{number}: did not come back within 1 s"):
        play(env, 3)
    assert len([beat for beat in beats if beat > started_s]) > 5
    count = len(beats)
    time.sleep(0.5)
    assert len(beats) <= count + 1  # no heartbeat between calls
    env.close()
