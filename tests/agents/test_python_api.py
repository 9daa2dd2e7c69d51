"""Test the Python interface: train, watch the training, use the policy elsewhere."""

import json
import math
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from agents_ranks import world_of_one
from gymnasium import spaces
from own_cores import Decay
from train_runs import REPO, only_error, records, start, train_here

import agents
from agents import load_policy, train
from agents.api.seeds import mean_interval
from agents.evaluate.episodes import PolicyController
from agents.run.callbacks import Watch
from agents.run.saved import load_agent
from envs import make_vector_env
from envs.vector.spaces import from_json, to_json
from rl_dist.errors import UserError

TINY = {"num_envs": 4, "num_steps": 16, "bptt_steps": 8, "batch_size": 4, "hidden_size": 8}
TINY |= {"device": "cpu", "eval_episodes": 2, "validate_every": 2}
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


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """Train on Pendulum-v1, which has bounded actions, from Python."""
    run_dir = tmp_path_factory.mktemp("api") / "pendulum"
    return train("Pendulum-v1", total_steps=256, run_dir=run_dir, **TINY)


def test_python_trains_what_the_command_trains(pendulum, tmp_path, monkeypatch):
    flags = [*FLAGS, "--env=Pendulum-v1", "--total_steps=256", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 0
    summaries = [
        json.loads((path / "summary.json").read_text())
        for path in (tmp_path / "run", pendulum.run_dir)
    ]
    assert summaries[0] == summaries[1] and pendulum.test == summaries[0]["test"]
    assert [line["iteration"] for line in pendulum.metrics] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learning_rat": 1}, "learning_rat"),
        ({"learning_rate": 99.0}, "learning_rate"),
        ({"env": "Nope-v9"}, "'Nope-v9'"),
        ({"policy": "own", "core": Decay}, "core"),
        ({"stop_at": "valid/return"}, "stop_at"),
        ({"stop_at": "valid/sharpe 1"}, "valid/sharpe"),
        ({"stop_at": "optim/loss_scale 1"}, "optim/loss_scale"),  # exists only with fp16
        ({"keep_best": "rank"}, "valid/return"),
    ],
)
def test_a_bad_setting_is_an_error_in_python_and_leaves_nothing(settings, named, tmp_path, capsys):
    with pytest.raises(UserError, match=named) as refused:
        train(**TINY | {"env": "CartPole-v1"} | settings, run_dir=tmp_path / "run")
    assert only_error(capsys.readouterr().err) == f"error: {refused.value}"
    assert not (tmp_path / "run").exists()


def test_signal_handlers_are_put_back_and_a_thread_trains_without_them(tmp_path):
    before = [*map(signal.getsignal, signal.valid_signals())]
    runs = []

    def work():
        run_dir = tmp_path / str(len(runs))
        runs.append(train("Pendulum-v1", total_steps=64, run_dir=run_dir, **TINY))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [run.test["episodes"] for run in runs] == [2, 2]
    assert [*map(signal.getsignal, signal.valid_signals())] == before


def test_ranks_of_a_script_that_calls_train_without_a_guard_are_one_line(tmp_path):
    script, run_dir = tmp_path / "unguarded.py", tmp_path / "run"
    settings = TINY | {"num_ranks": 2, "run_dir": str(run_dir)}
    script.write_text(f"from agents import train\ntrain('Pendulum-v1', **{settings})\n")
    err = start(script).communicate()[1]
    (line,) = re.findall("^error: .*", err, re.MULTILINE)
    assert '`if __name__ == "__main__":`' in line and not run_dir.exists()
    assert err.count("Traceback") == 1  # only from the script's call of train


# ---- policies


@pytest.mark.parametrize("batched", [True, False])
def test_a_loaded_policy_acts_as_the_evaluation_does(pendulum, batched):
    policy = load_policy(pendulum.run_dir)
    env = make_vector_env("Pendulum-v1", 3)
    assert to_json(policy.observation_space, policy.action_space) == env.spaces_json
    agent = load_agent(pendulum.run_dir, which="")
    controller = PolicyController(agent.policy, agent.normalizer)
    obs = env.reset(seed=[1, 2, 3])[0]
    start = torch.ones(3, dtype=torch.bool)
    state, single = None, [None] * 3
    for _ in range(5):
        expected = env.decoder(controller(env, obs, start))
        if batched:
            actions, state = policy.predict(obs.numpy(), state, start.numpy())
        else:
            pairs = [policy.predict(obs[i].numpy(), single[i]) for i in range(3)]
            actions, single = np.stack([a for a, _ in pairs]), [s for _, s in pairs]
        assert actions.shape == (3, 1) and policy.action_space.contains(actions[0])
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-6)
        obs, _, terminated, truncated, _ = env.step(torch.as_tensor(expected / 2.0))
        start = terminated | truncated


def test_an_episode_start_forgets(pendulum):
    policy = load_policy(pendulum.run_dir)
    one, two = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    fresh, _ = policy.predict(two)
    _, state = policy.predict(one)
    again, _ = policy.predict(two, state, np.array([True, False]))
    np.testing.assert_allclose(again[0], fresh[0], atol=1e-7)
    assert not np.allclose(again[1], fresh[1], atol=1e-7)


CASES = {
    "examples.many_spaces:MaskedCartPole-v0": {"info_mask": True, "previous_reward": True},
    "examples.many_spaces:Orders-v0": {"policy": "gru", "previous_action": True},
}


@pytest.mark.parametrize("env_id", CASES)
def test_masks_last_actions_and_rewards_reach_a_loaded_policy(env_id, tmp_path):
    settings = CASES[env_id]
    run = train(env_id, total_steps=64, run_dir=tmp_path / "run", **settings, **TINY)
    policy, agent = load_policy(run.run_dir, "last"), load_agent(run.run_dir, which="last")
    with torch.no_grad():  # larger weights make the actions depend on every input
        for parameter in agent.policy.parameters():
            parameter.mul_(3.0)
        policy.agent.policy.load_state_dict(agent.policy.state_dict())
    controller = PolicyController(agent.policy, agent.normalizer)
    inputs = {name: value for name, value in settings.items() if name != "policy"}
    rows, single = make_vector_env(env_id, 1, **inputs), gymnasium.make(env_id)
    row, start = rows.reset(seed=[3])[0], torch.ones(1, dtype=torch.bool)
    obs, info = single.reset(seed=3)
    state, reward = None, 0.0
    for _ in range(40):
        more = {"action_masks": info["action_mask"]} if settings.get("info_mask") else {}
        expected = controller(rows, row, start)
        action, state = policy.predict(obs, state, start.numpy(), reward=reward, **more)
        assert np.array_equal(action, rows.decoder(expected)[0])
        row, _, terminated, truncated, _ = rows.step(expected)
        obs, reward, *ends, info = single.step(action)
        start = terminated | truncated
        if any(ends):
            break
    with pytest.raises(ValueError, match="mask|shape"):
        policy.predict(obs, state, action_masks=np.ones(99))


def test_stable_baselines3_evaluates_a_policy_as_it_acts_from_fresh_states(pendulum):
    why = "stable-baselines3 is not installed"
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation", reason=why)
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env", reason=why)
    policy = load_policy(pendulum.run_dir)
    env = vec_env.DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")])
    env.seed(5)
    returns, _ = evaluation.evaluate_policy(
        policy, env, n_eval_episodes=2, return_episode_rewards=True, warn=False
    )
    env = gymnasium.make("Pendulum-v1")
    for episode in range(2):
        obs, _ = env.reset(seed=None if episode else 5)
        state, total, truncated = None, 0.0, False
        while not truncated:
            action, state = policy.predict(obs, state)
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        assert returns[episode] == pytest.approx(total, rel=1e-4)


class OwnBox(spaces.Box):
    """Subclass of Box, which is read back as a Box."""


SPACES = [
    OwnBox(np.array([-np.inf, 0.0]), np.array([np.inf, 7.0]), dtype=np.float64),
    spaces.Box(0, 255, (8, 8, 3), np.uint8),
    spaces.Discrete(4, start=2),
    spaces.Dict(
        [("b", spaces.MultiBinary(2)), ("a", spaces.Tuple([spaces.MultiDiscrete([2, 3])]))]
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_survive_json(space):
    text = to_json(space, spaces.Discrete(2))
    assert from_json(text) == (space, spaces.Discrete(2)) and len(text) < 400
    assert str(from_json(text)[0]) == str(space)  # keys keep their order


# ---- callbacks and early stops


def test_callbacks_see_a_training_that_stops_when_a_metric_is_reached(tmp_path, capsys):
    seen = []
    run = train(
        "CartPole-v1",
        total_steps=10**6,
        stop_at=("valid/return", 1),
        run_dir=tmp_path / "run",
        **{f"on_{kind}": seen.append for kind in ("iteration", "evaluation", "checkpoint")},
        **TINY,
    )
    kinds = [(moment.kind, moment.metrics["iteration"]) for moment in seen]
    assert [number for kind, number in kinds if kind == "iteration"] == [1, 2]
    assert [number for kind, number in kinds if kind == "evaluation"] == [2]
    assert seen[-1].kind == "checkpoint" and seen[-1].checkpoint.exists()
    assert len(run.metrics) == 2 and run.test
    assert "stopped at iteration 2: valid/return is" in capsys.readouterr().out


def test_an_error_in_a_callback_is_a_failure_in_one_line_with_its_traceback_in_the_log(
    tmp_path, capsys
):
    with pytest.raises(UserError) as failed:
        train("CartPole-v1", run_dir=tmp_path / "run", on_iteration=raise_value_error, **TINY)
    progress, error = capsys.readouterr().err.splitlines()
    assert progress.startswith("iteration 1 ") and failed.value.exit_code == 1
    assert error == f"error: {failed.value}"
    log = tmp_path / "run" / "logs" / "rank_0.log"
    for part in ("test_python_api:raise_value_error", "ValueError: invalid", str(log)):
        assert part in error
    assert "in raise_value_error" in log.read_text()


def test_a_callback_of_the_command_stops_training_which_still_ends_in_order(tmp_path):
    run = train(
        "CartPole-v1",
        total_steps=10**6,
        run_dir=tmp_path / "run",
        callback="test_python_api:stop_on_rank_1",
        num_ranks=2,
        **TINY,
    )
    assert len(run.metrics) == 2 and run.test["episodes"] == 2
    saved = [path.name for path in (run.run_dir / "checkpoints").glob("it*")]
    assert saved == ["iteration_00000002.pt"]


def test_an_update_without_a_gradient_step_has_no_losses_to_watch():
    seen = []
    training = SimpleNamespace(job=SimpleNamespace(run_dir=None), policy=None)
    with world_of_one() as world:
        watch = Watch({"iteration": seen.append}, world, ("loss/policy", 0.0))
        assert watch(training, {"loss/policy": math.nan, "iteration": 1}) == ""
        assert seen[0].metrics == {"loss/policy": None, "iteration": 1}
        assert watch(training, {"loss/policy": 0.5}) == "loss/policy is 0.5, at least 0"


def test_a_metric_that_no_environment_gives_is_a_warning_and_one_that_it_gives_stops(
    tmp_path, monkeypatch, capsys
):
    """A metric env/... is no error at the start: an environment may add it later."""
    monkeypatch.syspath_prepend(REPO / "examples")
    cue = TINY | {"env": "own_environment:Cue-v0", "total_steps": 256}
    both = {"stop_at": "env/right_answer 2", "keep_best": "env/right"}
    assert len(train(**cue, **both, run_dir=tmp_path / "mistyped").metrics) == 4
    err = capsys.readouterr().err
    assert re.findall(r"warning: (\w+) env/right", err) == ["stop_at", "keep_best"]
    reached = train(**cue, stop_at="env/right_answers 0", run_dir=tmp_path / "right")
    assert len(reached.metrics) == 1 and "stop_at" not in capsys.readouterr().err


# ---- several seeds


def test_the_interval_holds_the_mean_of_the_scores():
    scores = np.random.default_rng(0).normal(5.0, 2.0, 9)
    mean, low, high = mean_interval(scores)
    assert low < mean < high and mean == pytest.approx(scores.mean())
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 3, rel=0.15)


@pytest.mark.slow
def test_several_seeds_are_trained_and_reported(tmp_path, monkeypatch, capfd):
    flags = [*FLAGS, "--env=CartPole-v1", "--total_steps=64", "--run_dir", tmp_path]
    for _ in range(2):  # the second call does not train again
        assert train_here(monkeypatch, *flags, "--seeds", 1, 2) == 0
        assert "95 % interval" in capfd.readouterr().out
        report = json.loads((tmp_path / "seeds.json").read_text())
        assert report["scores"].keys() == {"1", "2"}
        assert all(len(records(tmp_path / f"seed_{seed}")) == 1 for seed in (1, 2))
    assert train_here(monkeypatch, *flags, "--seeds", 1) == 2


def test_the_package_offers_its_names_and_importing_it_loads_next_to_nothing():
    assert all(getattr(agents, name) for name in agents.__all__)
    code = "import agents, sys; print(len(sys.modules), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    count, has_torch = done.stdout.split()
    assert has_torch == "False" and int(count) < 200
