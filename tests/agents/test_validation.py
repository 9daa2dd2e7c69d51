"""Test what validation and the final test may cost, and where they end."""

import socket

import gymnasium
import numpy as np
import pytest
from train_runs import RECALL, records, train_here

from agents.evaluate.episodes import episode_limit
from agents.trainer import Training
from rl_dist.files import read_object

ITERATION = 64  # environment steps in an iteration with the sizes of RECALL
SMALL = RECALL[2:]  # RECALL without --env
WIDE = ["--num_envs", 32, "--batch_size", 32]  # 512 environment steps in an iteration


class Endless(gymnasium.Env):
    """An environment whose episodes never end; counts the steps of all its instances."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def __init__(self, length=0):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.age += 1
        Endless.steps += 1
        return np.full(1, self.age % 2, np.float32), 1.0, self.age == self.length, False, {}


class Single(Endless):
    """An environment of which only one instance at a time can exist."""

    def __init__(self, port, length=8):
        super().__init__(length)
        self.licence = socket.socket()
        self.licence.bind(("127.0.0.1", port))

    def close(self):
        self.licence.close()


gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Limited-v0", entry_point=Endless, max_episode_steps=8)
gymnasium.register("Single-v0", entry_point=Single)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def valid(run_dir, name):
    """Return {iteration: value} of a validation metric."""
    name = f"valid/{name}"
    return {line["iteration"]: line[name] for line in records(run_dir) if name in line}


@pytest.mark.parametrize(
    "env",
    [["Endless-v0", "--env_kwargs", '{"length": 8}'], ["Limited-v0"], ["Endless-v0"]],
    ids=["ends by itself", "has a step limit", "never ends"],
)
def test_validation_takes_at_most_a_tenth_of_the_steps_of_training(env, tmp_path, monkeypatch):
    Endless.steps = 0
    steps = 40 * 512
    flags = [*SMALL, *WIDE, "--total_steps", steps, "--stop_at", "valid/total_steps 1e9"]
    flags += ["--run_dir", tmp_path, "--eval_episodes", 2, "--no-normalize_obs", "--env", *env]
    assert train_here(monkeypatch, *flags, "--no-normalize_rewards") == 0
    counted = [*valid(tmp_path, "total_steps").values()][-1]
    test = read_object(tmp_path / "summary.json")
    tested = [int(2 * test[name]["length"]) for name in ("test", "best") if name in test]
    assert 0 < counted <= steps / 10
    assert Endless.steps == steps + counted + sum(tested)


def test_a_resumed_run_has_the_same_validations_as_an_uninterrupted_one(tmp_path, monkeypatch):
    flags = [*RECALL, *WIDE, "--total_steps", 44 * 512, "--eval_episodes", 50, "--run_dir"]
    assert train_here(monkeypatch, *flags, tmp_path / "whole") == 0
    halt = ["--stop_at", f"global_step {30 * 512}"]
    assert train_here(monkeypatch, *flags, tmp_path / "parts", *halt) == 0
    assert train_here(monkeypatch, "--resume", tmp_path / "parts", "--stop_at", "") == 0
    for name in ("total_steps", "episodes", "return"):
        assert valid(tmp_path / "parts", name) == valid(tmp_path / "whole", name)
    assert len(valid(tmp_path / "whole", "return")) > 1


def test_the_number_of_ranks_does_not_change_the_episodes_of_a_validation(tmp_path, monkeypatch):
    flags = [*RECALL, *WIDE, "--total_steps", 21 * 512, "--precision", "fp64", "--run_dir"]
    assert train_here(monkeypatch, *flags, tmp_path / "one") == 0
    assert train_here(monkeypatch, *flags, tmp_path / "two", "--num_gpus", 2) == 0
    for name in ("total_steps", "episodes", "return"):
        assert valid(tmp_path / "two", name) == valid(tmp_path / "one", name) != {}


def test_a_given_interval_is_kept_whatever_it_costs(tmp_path, monkeypatch):
    flags = [*RECALL, "--total_steps", 3 * ITERATION, "--eval_episodes", 20, "--run_dir", tmp_path]
    assert train_here(monkeypatch, *flags, "--validate_every", 1) == 0
    assert valid(tmp_path, "episodes") == {1: 20, 2: 20, 3: 20}


def test_the_final_test_of_endless_episodes_ends_and_counts_them_as_cut(tmp_path, monkeypatch):
    flags = [*SMALL, "--total_steps", ITERATION, "--eval_episodes", 2, "--run_dir", tmp_path]
    assert train_here(monkeypatch, *flags, "--env", "Endless-v0") == 0
    test = read_object(tmp_path / "summary.json")["test"]
    assert (test["length"], test["episodes_cut"]) == (1000, 2)


@pytest.mark.parametrize(
    ("global_step", "episodes", "limit"),
    [(500, 0, 1000), (2000, 100, 1000), (50_000, 100, 5000), (10**9, 10, 100_000)],
)
def test_an_episode_is_cut_at_10_times_the_mean_length_of_training(global_step, episodes, limit):
    assert episode_limit(global_step, episodes) == limit


def test_without_evaluation_episodes_nothing_is_validated_or_tested(tmp_path, monkeypatch):
    flags = [*RECALL, "--total_steps", 2 * ITERATION, "--eval_episodes", 0, "--run_dir", tmp_path]
    assert train_here(monkeypatch, *flags, "--validate_every", 1) == 0
    assert not valid(tmp_path, "return")
    assert "test" not in read_object(tmp_path / "summary.json")


SINGLE = [*SMALL, "--env", "Single-v0", "--num_envs", 1, "--batch_size", 1, "--total_steps", 64]


def test_an_environment_of_one_instance_is_refused_before_any_work(port, tmp_path, monkeypatch):
    flags = [*SINGLE, "--env_kwargs", f'{{"port": {port}}}', "--run_dir", tmp_path / "run"]
    monkeypatch.setattr(Training, "warm_up_normalizers", None)  # training must not begin
    assert train_here(monkeypatch, *flags) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fix", ["--validate_every=0 --eval_episodes=1", "--eval_episodes=0"])
def test_the_flags_that_this_refusal_names_train(fix, port, tmp_path, monkeypatch):
    flags = [*SINGLE, "--env_kwargs", f'{{"port": {port}}}', "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags, *fix.split()) == 0


def test_the_first_checkpoint_is_saved_after_the_first_iteration(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("agents.trainer.save", lambda training, *_: seen.append(training.iteration))
    flags = [*RECALL, "--total_steps", 4 * ITERATION, "--eval_episodes", 0, "--run_dir", tmp_path]
    train_here(monkeypatch, *flags)
    assert seen == [1, 4]
