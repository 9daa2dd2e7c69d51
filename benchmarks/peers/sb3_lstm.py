"""sb3-contrib's RecurrentPPO with one LSTM for actor and critic."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv
from tasks import StockLikeVectorEnv
from turns import (
    CLIP,
    ENT_COEF,
    EPOCHS,
    GAE_LAMBDA,
    GAMMA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MINIBATCH_STEPS,
    NUM_ENVS,
    NUM_STEPS,
    VF_COEF,
    Turns,
    arguments,
)


class Batch(VecEnv):
    """A vector environment by the interface of Stable-Baselines3."""

    def __init__(self, env: Any) -> None:
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Any:
        """Begin new episodes."""
        return self.env.reset(seed=1)[0]

    def step_async(self, actions: Any) -> None:
        """Take the actions."""
        self.actions = actions

    def step_wait(self) -> Any:
        """Step all environments."""
        obs, rewards, terminated, truncated, info = self.env.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(terminated | truncated):
            infos[row]["terminal_observation"] = info["final_obs"][row]
        return obs, rewards.astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        """Nothing is held."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return the attributes: none."""
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set nothing."""

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kw: Any) -> list[Any]:
        """Call nothing."""
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Nothing is wrapped."""
        return [False] * self.num_envs


class Iterations(BaseCallback):
    """Takes turns where a rollout begins, which is where an iteration ends."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns
        self.marks: list[float] = []

    def _on_rollout_start(self) -> None:
        now = time.perf_counter()
        measured: dict[str, float | None] = {}
        if self.marks:
            began, collected = self.marks
            lengths = [one["l"] for one in self.model.ep_info_buffer or ()]
            measured = {"collect_s": collected - began, "update_s": now - collected}
            measured["episode_length"] = sum(lengths) / len(lengths) if lengths else None
        self.turns.next(**measured)
        self.marks = [time.perf_counter()]

    def _on_rollout_end(self) -> None:
        self.marks.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    turns = Turns(trainer=f"sb3-contrib {version('sb3-contrib')}", torch=torch.__version__)
    torch.set_num_threads(threads)
    if task.discrete:
        env: Any = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=1)
    else:
        env = Batch(StockLikeVectorEnv(NUM_ENVS))
    heads = [task.hidden_size]  # the tanh layer: one of each head
    network = {
        "lstm_hidden_size": task.hidden_size,
        "shared_lstm": True,
        "enable_critic_lstm": False,
        "net_arch": {"pi": heads, "vf": heads},
    }
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=NUM_STEPS,
        batch_size=MINIBATCH_STEPS,
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        ent_coef=ENT_COEF,
        vf_coef=VF_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs=network,
        device="cpu",
        seed=1,
    )
    model.learn(total_timesteps=10**9, callback=Iterations(turns))


if __name__ == "__main__":
    main()
