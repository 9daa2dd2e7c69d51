"""The batches of examples/batched_envs.py and of ale-py, with the packages that they need."""

import pytest
import torch
from env_steps import play, same
from train_runs import RECALL, train_here

from envs import make_vector_env
from envs.task import TaskConfig, TaskSettings, make_task
from envs.vector.adapter import TorchVectorEnv

BATCHES = [
    pytest.param("CartPole", "", marks=[]),
    pytest.param("EnvPool", "envpool", marks=pytest.mark.slow),
    pytest.param("make_gymnax", "gymnax", marks=pytest.mark.slow),
]


def batch_of(name, num_envs, env_offset=0):
    settings = TaskSettings(task=TaskConfig(env=f"examples.batched_envs:{name}"))
    return make_task(settings).evaluation_env(num_envs, env_offset)


@pytest.mark.parametrize("name, package", BATCHES)
def test_an_environment_does_not_depend_on_the_others_of_its_batch(name, package):
    if package:
        pytest.importorskip(package)
    seeds = [3, 5, 7, 9]
    whole, part = batch_of(name, 4), batch_of(name, 2, 2)
    first = whole.reset(seed=seeds)[0][2:], *(column[:, 2:] for column in play(whole, 60))
    assert same(
        first, [part.reset(seed=seeds[2:])[0], *play(part, 60, rows=slice(2, 4), num_envs=4)]
    )


@pytest.mark.parametrize("name, package", BATCHES)
def test_a_policy_is_trained_and_tested(name, package, tmp_path):
    if package:
        pytest.importorskip(package)
    flags = [*RECALL, f"--env=examples.batched_envs:{name}", "--total_steps=256"]
    assert train_here(*flags, "--eval_episodes=4", "--run_dir", tmp_path) == 0


@pytest.mark.slow
def test_mjlab_trains_to_its_end(tmp_path):
    pytest.importorskip("mjlab")
    flags = [*RECALL, "--env=examples.batched_envs:make_mjlab", "--total_steps=256"]
    assert train_here(*flags, "--eval_episodes=0", "--run_dir", tmp_path) == 0


@pytest.mark.slow
def test_pong_uses_the_batch_of_ale_py_with_preprocessed_frames():
    pytest.importorskip("ale_py")
    whole, part = (make_vector_env("ale_py:ALE/Pong-v5", count) for count in (3, 1))
    assert type(whole) is TorchVectorEnv and not whole.note
    assert whole.layout.describe() == "observation image[4, 84, 84]"
    obs = whole.reset(seed=[3, 5, 7])[0]
    assert obs.dtype == torch.uint8
    first = obs[2:], *(column[:, 2:] for column in play(whole, 20))
    alone = part.reset(seed=[7])[0]
    assert same(first, [alone, *play(part, 20, rows=slice(2, 3), num_envs=3)])
