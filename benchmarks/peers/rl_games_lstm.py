"""rl_games, its LSTM actor-critic; it has no vector environment of its own process: a batch."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from typing import Any

import rl_games.common.a2c_common as a2c
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
from tasks import CartPoleVectorEnv, StockLikeVectorEnv
from turns import (
    BPTT_STEPS,
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
    Task,
    Turns,
    arguments,
)


class Batch(IVecEnv):
    """A vector environment by the interface of rl_games."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self) -> Any:
        """Begin new episodes."""
        return self.env.reset(seed=None)[0]

    def step(self, actions: Any) -> Any:
        """Step all of them."""
        obs, rewards, terminated, truncated, _ = self.env.step(actions)
        return obs, rewards.astype("float32"), terminated | truncated, {}

    def get_env_info(self) -> dict[str, Any]:
        """Return the spaces."""
        space = {"observation_space": self.env.single_observation_space, "agents": 1}
        return space | {"action_space": self.env.single_action_space}


def configuration(task: Task, threads: int, folder: str) -> dict[str, Any]:
    """Return what rl_games reads from a YAML file."""
    gaussian = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {"discrete": None} if task.discrete else {"continuous": gaussian},
        "mlp": {
            "units": [task.hidden_size],
            "activation": "tanh",
            "initializer": {"name": "default"},
            "regularizer": {"name": "None"},
        },
        "rnn": {
            "name": "lstm",
            "units": task.hidden_size,
            "layers": 1,
            "before_mlp": True,
            "concat_input": False,
            "layer_norm": False,
        },
    }
    config = {
        "name": "comparison",
        "env_name": "batch",
        "train_dir": folder,
        "reward_shaper": {"scale_value": 1.0},
        "normalize_advantage": True,
        "normalize_input": False,
        "normalize_value": False,
        "gamma": GAMMA,
        "tau": GAE_LAMBDA,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": None,
        "kl_threshold": 0.008,
        "score_to_win": 1e9,
        "truncate_grads": True,
        "grad_norm": MAX_GRAD_NORM,
        "entropy_coef": ENT_COEF,
        "critic_coef": VF_COEF,
        "e_clip": CLIP,
        "clip_value": False,
        "bounds_loss_coef": 0.0,
        "num_actors": NUM_ENVS,
        "horizon_length": NUM_STEPS,
        "minibatch_size": MINIBATCH_STEPS,
        "mini_epochs": EPOCHS,
        "seq_length": BPTT_STEPS,
        "device": "cpu",
        "device_name": "cpu",
        "ppo": True,
        "multi_gpu": False,
        "mixed_precision": False,
        "max_epochs": 10**9,
        "save_frequency": 0,
        "save_best_after": 10**9,
        "print_stats": False,
    }
    kind = "discrete" if task.discrete else "continuous"
    return {
        "params": {
            "seed": 1,
            "torch_threads": threads,
            "algo": {"name": f"a2c_{kind}"},
            "model": {"name": "discrete_a2c" if task.discrete else "continuous_a2c_logstd"},
            "load_checkpoint": False,
            "load_path": "",
            "network": network,
            "config": config,
        }
    }


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    turns = Turns(trainer=f"rl_games {version('rl-games')}", torch=torch.__version__)
    torch.set_num_threads(threads)
    env_type = CartPoleVectorEnv if task.discrete else StockLikeVectorEnv
    vecenv.register("BATCH", lambda name, count, **_: Batch(env_type(count)))
    env_configurations.register("batch", {"vecenv_type": "BATCH", "env_creator": lambda **_: None})
    for base in (a2c.DiscreteA2CBase, a2c.ContinuousA2CBase):

        def train_epoch(agent: Any, plain: Any = base.train_epoch) -> Any:
            found = plain(agent)
            collect_s, update_s = found[1], found[2]
            length = agent.game_lengths.get_mean() if agent.game_lengths.current_size else None
            length = None if length is None else float(length)
            turns.next(collect_s=collect_s, update_s=update_s, episode_length=length)
            return found

        base.train_epoch = train_epoch
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner()
        runner.load(configuration(task, threads, folder))
        runner.run({"train": True, "play": False})


if __name__ == "__main__":
    main()
