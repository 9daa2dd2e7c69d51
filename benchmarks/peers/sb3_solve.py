"""sb3-contrib's RecurrentPPO on CartPole without velocities; time_to_solve.py watches it.

The settings are those that its authors tuned for CartPoleNoVel-v1: rl-baselines3-zoo,
hyperparams/ppo_lstm.yml. Writes a line of JSON after each rollout, with our trainer's keys.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TextIO

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


class Episodes(BaseCallback):
    """Writes the episodes of each rollout."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.file = file
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        self.returns += [info["episode"]["r"] for info in infos if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        mean = float(np.mean(self.returns)) if self.returns else None
        found = {"episode/return": mean, "episode/count": len(self.returns)}
        print(json.dumps({"global_step": self.num_timesteps} | found), file=self.file, flush=True)
        self.returns = []


def positions(env: gym.Env) -> gym.Env:
    """Take the velocities out of CartPole's observations."""
    assert isinstance(env.observation_space, gym.spaces.Box)
    space = gym.spaces.Box(env.observation_space.low[::2], env.observation_space.high[::2])
    return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], space)


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser()
    for name in ("seed", "total_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
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
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "lstm_hidden_size": 64,
            "enable_critic_lstm": True,
            "net_arch": {"pi": [64], "vf": [64]},
        },
        seed=args.seed,
        device="cpu",
    )
    with args.metrics.open("w") as file:
        model.learn(args.total_steps, callback=Episodes(file))


if __name__ == "__main__":
    main()
