"""Test the Python interface: training, callbacks, and loaded policies."""

import asyncio
import logging
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_cores import Decay
from policies import small
from test_export import VECTOR, agent_of, make_agent
from train_runs import REPO, printed_error, records, start, train_here

import agents
from agents import LoadedPolicy, load_policy, train
from agents.learner.controller import PolicyController
from agents.learner.network.noise import action_noise
from envs import make_vector_env
from envs.vector.layout import Part
from rl_dist.errors import UserError
from rl_dist.files import read_object
from rl_dist.process_group.process_ends import STOP_SIGNALS

TINY = {"num_envs": 4, "num_steps": 16, "bptt_steps": 8, "batch_size": 4, "hidden_size": 8}
TINY |= {"device": "cpu", "eval_episodes": 2, "validate_every": 2}
IMAGE = {"camera": np.zeros((2, 13, 12, 3), np.uint8), "speed": np.zeros(4), "gear": 1}
PLACE = np.zeros(4)
ONE_STATE = np.zeros((1, 6, 8)), np.zeros((1, 0, 4)), np.zeros((1, 0))
MASK = np.array([1, 0, 0, 0, 0, 0, 0])
MASKED = "several masked choices"
FLAGS = [f"--{name}={value}" for name, value in TINY.items()]


def stop_on_rank_1(moment):
    """Callback that requests a stop in iteration 2, on rank 1 only."""
    return np.bool_(moment.rank != 1 or moment.metrics["iteration"] != 2)


def raise_value_error(moment):
    """Callback that raises a ValueError."""
    return int("seven")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(1)


def handlers():
    return [*map(signal.getsignal, STOP_SIGNALS)]


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """Train from Python on Pendulum-v1, whose actions are bounded."""
    run_dir, before = tmp_path_factory.mktemp("api") / "pendulum", handlers()
    run = train("Pendulum-v1", total_steps=256, run_dir=run_dir, **TINY)
    assert handlers() == before
    return run


def test_training_from_python_equals_the_command_also_in_a_thread(pendulum, tmp_path):
    flags = [*FLAGS, "--env=Pendulum-v1", "--total_steps=256", "--run_dir", tmp_path]
    codes = []
    thread = threading.Thread(target=lambda: codes.append(train_here(*flags)))
    thread.start()
    thread.join()
    assert codes == [0]
    assert read_object(tmp_path / "summary.json")["test"] == pendulum.test
    assert [line["iteration"] for line in pendulum.metrics] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"learning_rat": 1}, "learning_rat"),
        ({"env": "Nope-v9"}, "'Nope-v9'"),
        ({"policy": "own", "core": Decay}, "core"),
    ],
)
def test_a_bad_setting_is_an_error_in_python_and_leaves_nothing(settings, named, tmp_path, capsys):
    with pytest.raises(UserError, match=named) as refused:
        train(**TINY | {"env": "CartPole-v1"} | settings, run_dir=tmp_path / "run")
    assert printed_error(capsys) == f"error: {refused.value}"
    assert not (tmp_path / "run").exists()


def test_a_script_that_calls_train_without_a_guard_fails_with_one_line(tmp_path):
    script, run_dir = tmp_path / "unguarded.py", tmp_path / "run"
    settings = TINY | {"num_ranks": 2, "run_dir": str(run_dir)}
    script.write_text(f"from agents import train\ntrain('Pendulum-v1', **{settings})\n")
    err = start(script).communicate()[1]
    (line,) = re.findall("^error: .*", err, re.MULTILINE)
    assert '`if __name__ == "__main__":`' in line and not run_dir.exists()
    # Only the script's call of `train` prints a traceback; the ranks print none.
    assert err.count("Traceback") == 1


# ---- policies


def test_a_batch_acts_like_single_observations_and_an_episode_start_clears_the_state(pendulum):
    policy = load_policy(pendulum.run_dir)
    fresh, state = policy.predict(np.zeros((2, 3), np.float32))
    first, single = policy.predict(np.zeros(3, np.float32))
    np.testing.assert_allclose(fresh, [first] * 2, atol=1e-7)
    batch, _ = policy.predict(np.ones((2, 3), np.float32), state, np.array([True, False]))
    for row, before in enumerate((None, single)):
        alone, _ = policy.predict(np.ones(3, np.float32), before)
        np.testing.assert_allclose(batch[row], alone, atol=1e-7)
    assert not np.allclose(*batch, atol=1e-7)


CASES = [
    ("Pendulum-v1", "clstm", {}),
    ("agents_ranks:Levers-v0", "lstm", {"info_mask": True, "previous_reward": True}),
    ("examples.many_spaces:Orders-v0", "gru", {"previous_action": True}),
]


@pytest.mark.parametrize("env_id, kind, inputs", CASES)
def test_a_loaded_policy_acts_as_in_the_evaluation(env_id, kind, inputs, tmp_path):
    """A loaded policy gets masks, last actions and last rewards, as in training."""
    rows, single = make_vector_env(env_id, 1, **inputs), gymnasium.make(env_id)
    num_observed = len(make_vector_env(env_id, 1).layout.parts)
    extras = rows.layout.parts[num_observed:]
    spaces_of_env = single.observation_space, single.action_space
    agent = make_agent(small(policy=kind), *spaces_of_env, tmp_path, extras)
    policy, controller = LoadedPolicy(agent), PolicyController(agent.policy, agent.normalizer)
    row, start = rows.reset(seed=[3])[0], torch.ones(1, dtype=torch.bool)
    obs, info = single.reset(seed=3)
    state, reward = None, 0.0
    for _ in range(40):
        masks = info["action_mask"] if "info_mask" in inputs else None
        chosen = controller(rows, row, start)
        action, state = policy.predict(obs, state, action_masks=masks, reward=reward)
        np.testing.assert_allclose(action, rows.decoder(chosen.numpy())[0], rtol=0, atol=1e-6)
        assert policy.action_space.contains(action)
        row, _, terminated, truncated, _ = rows.step(chosen)
        obs, reward, *ends, info = single.step(action)
        start = terminated | truncated
        if any(ends):
            break


def test_stable_baselines3_evaluates_a_policy(pendulum):
    why = "stable-baselines3 is not installed"
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation", reason=why)
    policy, env = load_policy(pendulum.run_dir), gymnasium.make("Pendulum-v1")
    mean, _ = evaluation.evaluate_policy(policy, env, n_eval_episodes=1, warn=False)
    assert -2000 < mean < 0


@pytest.mark.parametrize(
    "form, observation, state, problem",
    [
        ("images", {"camera": IMAGE["camera"], "speed": PLACE}, None, "gear"),
        ("images", IMAGE | {"gear": 3}, None, "gear has a value outside"),
        ("clstm", np.zeros(3), None, "shape"),
        ("clstm", np.full(4, np.nan), None, "observation is nan"),
        ("clstm", np.zeros((2, 4)), ONE_STATE, "the state of 2 observations"),
        (MASKED, {"action_mask": MASK, "place": PLACE}, None, "allow an option"),
    ],
)
def test_observations_and_states_that_do_not_fit_are_refused(
    form, observation, state, problem, tmp_path
):
    policy = LoadedPolicy(agent_of(form, tmp_path))
    with pytest.raises(ValueError, match=problem):
        policy.predict(observation, state)


ALLOWED = [1, 0, 0], [0, 1]  # one mask per choice; each allows a single option


def test_masks_are_accepted_in_every_form(tmp_path):
    kind = small(), VECTOR, spaces.MultiDiscrete([3, 2])
    policy = LoadedPolicy(make_agent(*kind, tmp_path, (Part("action_mask", "mask", (5,)),)))
    for shape, masks in (((4,), ALLOWED), ((1, 4), [1, 0, 0, 0, 1]), ((2, 4), [ALLOWED] * 2)):
        assert (policy.predict(np.zeros(shape), action_masks=masks)[0] == [0, 1]).all()
    for masks in (ALLOWED, np.zeros((3, 5))):
        with pytest.raises(ValueError, match="shape|allow an option"):
            policy.predict(np.zeros((3, 4)), action_masks=masks)


def test_noise_of_sampled_actions_is_white_and_differs_from_that_of_training(tmp_path):
    """The noise differs from that of a training run with the same seed."""
    agent = agent_of("clstm", tmp_path)
    policy = LoadedPolicy(agent, seed=7)
    # The mean action is the middle of the bounds; the deviation is a tenth of their distance.
    with torch.no_grad():
        agent.policy.actor_head.weight.zero_()
        agent.policy.log_std.fill_(np.log(0.2))
    obs = np.zeros((1, 4))
    drawn = np.array([policy.predict(obs, deterministic=False)[0] for _ in range(400)])
    noise = (drawn[:, 0, 0] - [0.2, 446.5]) / [0.02, 90.7]  # shape [400, A]
    np.testing.assert_allclose([noise.mean(0), noise.std(0) - 1], 0, atol=0.2)
    trained = action_noise(spaces.Box(-1.0, 1.0, (2,)), 7, 0, 1, 0, 400)[:, 0].numpy()
    for other in (np.roll(noise, 1, 0), trained):
        assert np.abs((noise * other).mean(0)).max() < 0.2
    again = LoadedPolicy(agent, seed=7)
    assert np.array_equal(drawn[0], again.predict(obs, deterministic=False)[0])


# ---- callbacks and early stops


def test_callbacks_follow_a_training_that_stops_at_a_metric(tmp_path):
    seen = []
    run = train(
        "CartPole-v1",
        total_steps=10**6,
        stop_at=("valid/return", 1),
        run_dir=tmp_path,
        **{f"on_{kind}": seen.append for kind in ("iteration", "evaluation", "checkpoint")},
        **TINY,
    )
    kinds = [(moment.kind, moment.metrics["iteration"]) for moment in seen]
    assert [number for kind, number in kinds if kind == "iteration"] == [1, 2]
    assert [number for kind, number in kinds if kind == "evaluation"] == [2]
    assert seen[-1].kind == "checkpoint" and seen[-1].checkpoint.exists()
    assert len(run.metrics) == 2 and run.test


def test_a_second_training_at_the_same_time_is_refused_and_the_first_continues(tmp_path):
    refused = []

    def train_in_a_thread(moment):
        with ThreadPoolExecutor() as pool:
            job = pool.submit(train, "Recall-v0", run_dir=tmp_path / "second", **TINY)
        refused.append("already running" in str(job.exception()))

    options = {"total_steps": 128, "on_iteration": train_in_a_thread}
    train("Recall-v0", run_dir=tmp_path / "first", **options, **TINY)
    assert refused == [True, True] and not (tmp_path / "second").exists()


def test_an_error_in_a_callback_is_one_line_and_its_traceback_is_in_the_log(tmp_path, capsys):
    with pytest.raises(UserError) as failed:
        train("CartPole-v1", run_dir=tmp_path, on_iteration=raise_value_error, **TINY)
    progress, error = capsys.readouterr().err.splitlines()
    assert progress.startswith("iteration 1 ") and failed.value.exit_code == 1
    assert error == f"error: {failed.value}"
    log = tmp_path / "logs" / "rank_0.log"
    assert "ValueError: invalid" in error and str(log) in error
    assert "in raise_value_error" in log.read_text()


def interrupt(moment):
    if moment.metrics["iteration"] == 1:  # a second signal would end this process
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_and_raises_keyboard_interrupt_with_the_run_directory(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=str(tmp_path)):
        train("CartPole-v1", run_dir=tmp_path, on_iteration=interrupt, **TINY)
    assert (tmp_path / "checkpoints" / "iteration_00000002.pt").exists()


def hooks():
    return sys.excepthook, logging.getLogger().level, handlers()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_quiet_training_prints_nothing_and_leaves_the_process_as_it_was(
    num_ranks, tmp_path, capfd
):
    before = hooks()
    train(
        "CartPole-v1",
        run_dir=tmp_path,
        total_steps=128,
        callback="test_python_api:say",
        num_ranks=num_ranks,
        quiet=True,
        **TINY,
    )
    assert hooks() == before
    printed = capfd.readouterr()
    assert {*printed.out.splitlines()} == {"said"} and not printed.err


def say(moment):
    print("said")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_any_exception_of_a_callback_is_named(error, tmp_path):
    def fail(moment):
        raise error

    with pytest.raises(UserError, match=f"iteration callback raised {error.__name__};"):
        train("CartPole-v1", run_dir=tmp_path, on_iteration=fail, **TINY)


def test_a_callback_given_by_flag_stops_training_which_still_ends_regularly(tmp_path):
    run = train(
        "CartPole-v1",
        total_steps=10**6,
        run_dir=tmp_path,
        callback="test_python_api:stop_on_rank_1",
        num_ranks=2,
        **TINY,
    )
    assert len(run.metrics) == 2 and run.test["episodes"] == 2
    saved = sorted(path.name for path in (run.run_dir / "checkpoints").glob("it*"))
    assert saved == ["iteration_00000001.pt", "iteration_00000002.pt"]


# ---- several seeds


@pytest.mark.slow
def test_several_seeds_are_trained_and_reported(tmp_path, capfd):
    flags = [*FLAGS, "--env=CartPole-v1", "--total_steps=64", "--run_dir", tmp_path]
    for _ in range(2):  # the second call does not train again
        assert train_here(*flags, "--seeds", 1, 2) == 0
        assert "95 % interval" in capfd.readouterr().out
        report = read_object(tmp_path / "seeds.json")
        assert report["scores"].keys() == {"1", "2"}
        assert all(len(records(tmp_path / f"seed_{seed}")) == 1 for seed in (1, 2))
    assert train_here(*flags, "--seeds=1") == 2


def test_the_package_offers_its_names_and_its_import_is_light():
    assert all(getattr(agents, name) for name in agents.__all__)
    code = "import agents, sys; sys.exit('torch' in sys.modules or len(sys.modules) > 200)"
    assert not subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode


def test_an_episode_start_clears_the_previous_action(tmp_path):
    env_id, kind, inputs = CASES[2]
    rows, single = make_vector_env(env_id, 1, **inputs), gymnasium.make(env_id)
    extras = rows.layout.parts[len(make_vector_env(env_id, 1).layout.parts) :]
    spaces_of_env = single.observation_space, single.action_space
    policy = LoadedPolicy(make_agent(small(policy=kind), *spaces_of_env, tmp_path, extras))
    obs, _ = single.reset(seed=3)
    _, fresh = policy.predict(obs)
    _, again = policy.predict(obs, fresh, np.array([True]))
    np.testing.assert_allclose(again[0], fresh[0], atol=1e-7)
