"""Train stable-baselines3 with the settings that its authors tuned for a task, for task_table.py.

    python benchmarks/tuned_sb3.py lander --total_steps 1000000 --seed 1 --run_dir DIR

Writes the files of a run that task_table.py reads: metrics.jsonl and summary.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn


def learn(model: Any, args: argparse.Namespace) -> None:
    """Train and evaluate a model of stable-baselines3; write metrics and a summary as we do."""

    returns: list[float] = []

    class Episodes(BaseCallback):
        def _on_step(self) -> bool:
            infos = self.locals["infos"]
            returns.extend(info["episode"]["r"] for info in infos if "episode" in info)
            return True

        def _on_rollout_end(self) -> None:
            mean = float(np.mean(returns)) if returns else None
            record = {"global_step": self.num_timesteps, "episode/return": mean}
            print(json.dumps(record | {"episode/count": len(returns)}), file=file, flush=True)
            returns.clear()

    args.run_dir.mkdir(parents=True, exist_ok=True)
    with (args.run_dir / "metrics.jsonl").open("w") as file:
        model.learn(args.total_steps, callback=Episodes())
    if env := model.get_vec_normalize_env():
        env.training = False
    mean, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=100)
    (args.run_dir / "summary.json").write_text(json.dumps({"test": {"return": mean}}))


def cartpole(args: argparse.Namespace) -> None:
    """Train sb3-contrib's RecurrentPPO on CartPole without velocities.

    Source of the settings: CartPoleNoVel-v1 in rl-baselines3-zoo, hyperparams/ppo_lstm.yml.
    """
    from sb3_contrib import RecurrentPPO

    def positions(env: gymnasium.Env) -> gymnasium.Env:
        assert isinstance(env.observation_space, gymnasium.spaces.Box)
        low, high = env.observation_space.low[::2], env.observation_space.high[::2]
        space = gymnasium.spaces.Box(low, high)
        return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[::2], space)

    env = make_vec_env("CartPole-v1", n_envs=8, seed=args.seed, wrapper_class=positions)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        VecNormalize(env, norm_reward=False),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: left * 0.001,
        clip_range=lambda left: left * 0.2,
        policy_kwargs={
            "lstm_hidden_size": 64,
            "ortho_init": False,
            "activation_fn": nn.ReLU,
            "net_arch": {"pi": [64], "vf": [64]},
        },
        seed=args.seed,
        device=args.device,
    )
    learn(model, args)


def lander(args: argparse.Namespace) -> None:
    """Train stable-baselines3's PPO on LunarLander-v3.

    Source of the settings: LunarLander-v2 in rl-baselines3-zoo, hyperparams/ppo.yml.
    """
    from stable_baselines3 import PPO

    model = PPO(
        "MlpPolicy",
        make_vec_env("LunarLander-v3", n_envs=16, seed=args.seed),
        n_steps=1024,
        batch_size=64,
        gae_lambda=0.98,
        gamma=0.999,
        n_epochs=4,
        ent_coef=0.01,
        seed=args.seed,
        device=args.device,
    )
    learn(model, args)


def main() -> None:
    """Train and evaluate one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    models = {run.__name__: run for run in (cartpole, lander)}
    parser.add_argument("model", choices=models)
    for name in ("total_steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run_dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models[args.model](args)


if __name__ == "__main__":
    main()
