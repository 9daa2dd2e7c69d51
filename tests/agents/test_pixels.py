"""Test that images are bytes, stored once, from the environment to the CNN."""

import shutil

import numpy as np
import pytest
import torch
from agents_ranks import Cockpit, Recording, Screens, finish, make_job
from policies import ROWS, act_stepwise, make_inputs, make_policy
from train_runs import RECALL, run_here, train_here

from agents import load_policy
from agents.evaluate import command as evaluate
from agents.learner.network.inputs import Normalizers
from agents.run.auto import rollout_bytes
from envs.gym_task import GymTask
from envs.vector.layout import Layout, Part
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.resume_check import differences, result_of

FLAGS = [*RECALL, "--env=agents_ranks:Screens-v0", "--eval_episodes=2", "--policy=lstm"]
FLAGS += ["--total_steps=256", "--checkpoint_every=1", "--keep_checkpoints=9"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run of 4 iterations."""
    run_dir = tmp_path_factory.mktemp("pixels") / "run"
    assert train_here(*FLAGS, "--run_dir", run_dir) == 0
    return run_dir


def test_bytes_are_read_as_the_numbers_from_0_to_1_were():
    config, space, layout = ROWS["pixels"]
    policy = make_policy(config, space, layout)
    obs, *others = make_inputs(policy)
    assert obs.dtype == torch.uint8
    wanted = policy.feature_encoder.images[0](obs.view(-1, 1, 68, 64).double() / 255.0)
    torch.testing.assert_close(policy.encode(obs).flatten(0, 1), wanted, rtol=1e-13, atol=1e-13)
    as_numbers = act_stepwise(policy, obs.double(), *others)
    assert all(map(torch.equal, act_stepwise(policy, obs, *others), as_numbers))


def test_beside_a_vector_pixels_are_neither_normalised_nor_clipped():
    parts = Part("screen", "image", (1, 1, 2)), Part("height", "vector", (1,))
    normalizers = Normalizers(Layout(parts), scale_obs=True, scale_rewards=False)
    rows = torch.tensor([[0.0, 255.0, 1e9], [7.0, 200.0, 0.0]])
    seen = normalizers.obs(rows)
    assert torch.equal(seen[:, :2], rows[:, :2]) and seen[0, 2] == 10.0


def test_a_resumed_run_with_workers_continues_exactly(finished, tmp_path):
    resumed = shutil.copytree(finished, tmp_path / "resumed")
    for number in (3, 4):
        (resumed / f"checkpoints/iteration_{number:08}.pt").unlink()
    (resumed / "summary.json").unlink()
    saved = load_checkpoint(resumed / "checkpoints/iteration_00000002.pt")
    assert saved["carry"]["obs"].dtype == torch.uint8
    assert train_here("--resume", resumed, "--env_workers=2") == 0
    assert differences(result_of(resumed), result_of(finished)) == []


@pytest.mark.parametrize("env, extra", [(Screens, ""), (Cockpit, ""), (Screens, "reward")])
def test_a_loaded_policy_acts_as_in_evaluation(env, extra, tmp_path):
    flags = [f"--env=agents_ranks:{env.__name__}-v0", "--total_steps=64", "--run_dir", tmp_path]
    assert train_here(*FLAGS, *flags, *[f"--previous_{extra}"] * bool(extra)) == 0
    policy = load_policy(tmp_path)
    seen = env.observation_space.sample()
    dark, _ = policy.predict(seen)
    bright, _ = policy.predict(seen, reward=5.0)
    assert np.array_equal(dark, bright) == (not extra)
    assert run_here(evaluate.main, tmp_path) == 0


def test_one_environment_serves_the_choice_of_the_preset_and_the_check(tmp_path, monkeypatch):
    made = []
    probe_env = GymTask.probe_env
    monkeypatch.setattr(GymTask, "probe_env", lambda task: made.append(task) or probe_env(task))
    assert train_here(*FLAGS, "--total_steps=64", "--run_dir", tmp_path) == 0
    assert len(made) == 1


@pytest.mark.parametrize("side, named", [(128, False), (129, True)])
def test_raw_frames_get_a_line_with_the_usual_preprocessing(
    side, named, tmp_path, monkeypatch, capsys
):
    space = type(Screens.observation_space)(0, 255, (64, side), np.uint8)
    monkeypatch.setattr(Screens, "observation_space", space)
    monkeypatch.setattr(Screens, "seen", lambda env: np.zeros((64, side), np.uint8))
    assert train_here(*FLAGS, "--total_steps=64", "--eval_episodes=0", "--run_dir", tmp_path) == 0
    assert ("AtariPreprocessing" in capsys.readouterr().out) == named


# The process group stays open from here on, so no test below may start a run.
def test_a_rollout_holds_each_pixel_once_as_a_byte(world):
    training = finish(Recording(make_job("screens, lstm"), world))
    rollout = training.rollouts[-1]
    assert rollout.obs.dtype == torch.uint8 and rollout.raw_obs is rollout.obs
    count = rollout.logprobs.numel()
    assert rollout.obs.untyped_storage().nbytes() == count * 68 * 64
    bound = rollout_bytes(training.run.config, training.sizes.num_envs, training.policy)
    assert count * 68 * 64 < bound < count * 68 * 64 * 1.2 + 1e5
