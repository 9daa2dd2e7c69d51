"""sb3-contrib's RecurrentPPO on CartPole without velocities, until its last episodes reach a mean.

The settings are those that its authors tuned for CartPoleNoVel-v1: rl-baselines3-zoo,
hyperparams/ppo_lstm.yml. Prints a line of JSON when the mean is reached, or at the end.
"""

from __future__ import annotations

import argparse
import json

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


class Solved(BaseCallback):
    """Stops the training when the last episodes reach a mean return."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.goal = goal

    def _on_step(self) -> bool:
        last = self.model.ep_info_buffer
        assert last is not None
        return len(last) < last.maxlen or np.mean([each["r"] for each in last]) < self.goal


def positions(env: gym.Env) -> gym.Env:
    """Take the velocities out of CartPole's observations."""
    assert isinstance(env.observation_space, gym.spaces.Box)
    space = gym.spaces.Box(env.observation_space.low[::2], env.observation_space.high[::2])
    return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], space)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser()
    for name in ("seed", "total_steps", "episodes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--goal", type=float, required=True)
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
        stats_window_size=args.episodes,
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
    model.learn(args.total_steps, callback=Solved(args.goal))
    solved = model.num_timesteps < args.total_steps
    print(json.dumps({"steps": model.num_timesteps, "solved": solved}), flush=True)


if __name__ == "__main__":
    main()
