"""Test what validation and the final test may cost, and where they end."""

import gymnasium
import pytest
from misbehaving_envs import Misbehaving
from train_runs import RECALL, records, train_here

from agents.learner.trainer import Training
from envs.gym_task import episode_limit
from envs.task import Counts
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.files import read_object

ITERATION = 64  # environment steps in an iteration with the sizes of RECALL
SMALL = RECALL[2:]  # RECALL without --env
WIDE = ["--num_envs=32", "--batch_size=32"]  # 512 environment steps in an iteration


class Endless(Misbehaving):
    """An environment whose episodes never end; counts the steps of all its instances."""

    steps = 0

    def __init__(self, length=0):
        super().__init__()
        self.length = length

    def step(self, action):
        Endless.steps += 1
        obs, reward, *_ = super().step(action)
        return obs, reward, self.age == self.length, False, {}


class Single(Endless):
    """An environment of which only one instance at a time can exist."""

    exists = False

    def __init__(self):
        super().__init__(length=8)
        assert not Single.exists
        Single.exists = True

    def close(self):
        Single.exists = False


gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Single-v0", entry_point=Single)


@pytest.fixture
def trained(tmp_path):
    """Return a function that trains into a folder and returns it."""

    def run(*flags, name="run", code=0):
        assert train_here(*flags, "--run_dir", tmp_path / name) == code
        return tmp_path / name

    return run


def valid(run_dir):
    """Return the validation metrics of every iteration that has any."""
    return {
        line["iteration"]: {name: line[name] for name in line if name.startswith("valid/")}
        for line in records(run_dir)
        if "valid/return" in line
    }


@pytest.mark.parametrize(
    "kwargs",
    ['{"length": 8}', '{"max_episode_steps": 8}', "{}"],
    ids=["ends by itself", "has a step limit", "never ends"],
)
def test_validation_takes_at_most_a_tenth_of_the_steps_of_training(kwargs, trained):
    Endless.steps = 0
    steps = 40 * 512
    flags = [*SMALL, *WIDE, "--total_steps", steps, "--stop_at", "valid/total_steps 1e9"]
    flags += ["--eval_episodes=2", "--no-normalize_obs", "--no-normalize_rewards"]
    run_dir = trained(*flags, "--env=Endless-v0", "--env_kwargs", kwargs)
    counted = [*valid(run_dir).values()][-1]["valid/total_steps"]
    test = read_object(run_dir / "summary.json")
    tested = [int(2 * test[name]["length"]) for name in ("test", "best") if name in test]
    assert 0 < counted <= steps / 10
    assert Endless.steps == steps + counted + sum(tested)


def test_a_resumed_run_has_the_same_validations_as_an_uninterrupted_one(trained):
    flags = [*RECALL, *WIDE, "--total_steps", 44 * 512, "--eval_episodes=50"]
    whole = valid(trained(*flags, name="whole"))
    parts = trained(*flags, "--stop_at", f"global_step {30 * 512}")
    assert train_here("--resume", parts, "--stop_at", "") == 0
    assert valid(parts) == whole and len(whole) > 1


def test_a_mean_of_training_episodes_decides_only_once_100_have_ended(trained):
    flags = [*RECALL, "--total_steps=6400", "--eval_episodes=0", "--keep_best=episode/return"]
    run_dir = trained(*flags, "--stop_at", "episode/return -9")
    *_, before, last = records(run_dir)
    assert before["episode/total"] < 100 <= last["episode/total"]
    best = load_checkpoint(run_dir / "checkpoints" / "best.pt")
    assert best["iteration"] == last["iteration"]


def test_the_number_of_ranks_does_not_change_the_episodes_of_a_validation(trained):
    flags = [*RECALL, *WIDE, "--total_steps", 21 * 512, "--precision=fp64"]
    alone = valid(trained(*flags))
    assert valid(trained(*flags, "--num_gpus=2", name="two")) == alone != {}


def test_a_given_interval_is_kept_whatever_it_costs(trained):
    flags = [*RECALL, "--total_steps", 3 * ITERATION, "--eval_episodes=20"]
    metrics = valid(trained(*flags, "--validate_every=1"))
    assert [metrics[iteration]["valid/episodes"] for iteration in metrics] == [20, 20, 20]


def test_a_budget_that_allows_no_validation_is_reported(tmp_path, capfd):
    flags = [*RECALL, f"--total_steps={ITERATION}", f"--run_dir={tmp_path}"]
    assert train_here(*flags) == 0
    assert "no best.pt" in capfd.readouterr().out


def test_the_final_test_of_endless_episodes_ends_and_counts_them_as_cut(trained):
    flags = [*SMALL, "--total_steps", ITERATION, "--eval_episodes=2", "--env=Endless-v0"]
    test = read_object(trained(*flags) / "summary.json")["test"]
    assert (test["length"], test["episodes_cut"]) == (1000, 2)


@pytest.mark.parametrize(
    "global_step, episodes, limit",
    [(500, 0, 1000), (2000, 100, 1000), (50_000, 100, 5000), (10**9, 10, 100_000)],
)
def test_an_episode_is_cut_at_10_times_the_mean_length_of_training(global_step, episodes, limit):
    assert episode_limit(Counts(global_step=global_step, episodes=episodes)) == limit


def test_without_evaluation_episodes_nothing_is_validated_or_tested(trained):
    flags = [*RECALL, "--total_steps", ITERATION, "--eval_episodes=0", "--validate_every=1"]
    run_dir = trained(*flags)
    assert not valid(run_dir) and "test" not in read_object(run_dir / "summary.json")


SINGLE = [*SMALL, "--env=Single-v0", "--num_envs=1", "--batch_size=1", "--total_steps=64"]


def test_an_environment_of_one_instance_is_refused_before_any_work(trained, monkeypatch):
    monkeypatch.setattr(Training, "warm_up_normalizers", None)  # training must not begin
    monkeypatch.setattr(Single, "exists", False)  # is restored, as nobody closes the instance
    assert not trained(*SINGLE, code=2).exists()


@pytest.mark.parametrize("fix", ["--validate_every=0 --eval_episodes=1", "--eval_episodes=0"])
def test_the_flags_that_this_refusal_names_train(fix, trained):
    trained(*SINGLE, *fix.split())


def test_the_first_checkpoint_is_saved_after_the_first_iteration(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "agents.learner.trainer.save", lambda training, *_: seen.append(training.iteration)
    )
    trained(*RECALL, "--total_steps", 4 * ITERATION, "--eval_episodes=0")
    assert seen == [1, 4]
