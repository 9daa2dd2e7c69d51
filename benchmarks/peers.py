"""Run a trainer that takes turns with other trainers.

    python benchmarks/peers.py DRIVER [TASK] [--threads 1] [--ranks 1]

A driver is a function that runs one trainer. It imports only this trainer, because no Python
environment has all trainers installed. against_peers.py runs the drivers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from plain_trainers import bare, clean, ours
from torch import Tensor, nn
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
    MINIBATCHES,
    NUM_ENVS,
    NUM_STEPS,
    TASKS,
    VF_COEF,
    StockLikeVectorEnv,
    Task,
    Turns,
    parser_of,
    vector_env,
)


def batched_env(task: Task) -> Any:
    """Return a vector environment for trainers that cannot step single environments."""
    if task.discrete:
        return gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="vector_entry_point")
    return StockLikeVectorEnv(NUM_ENVS)


# ---- rl_games


def rl_games(task: Task, args: argparse.Namespace) -> None:
    """Train rl_games' LSTM actor-critic on 64 environments that are stepped together."""
    import rl_games.common.a2c_common as a2c
    from rl_games.common import env_configurations, vecenv
    from rl_games.torch_runner import Runner

    turns, env = Turns(f"rl_games {version('rl-games')}"), batched_env(task)

    class Batch(vecenv.IVecEnv):
        def reset(self) -> Any:
            return env.reset()[0]

        def step(self, actions: Any) -> Any:
            obs, rewards, terminated, truncated, _ = env.step(actions)
            return obs, rewards.astype("float32"), terminated | truncated, {}

        def get_env_info(self) -> dict[str, Any]:
            space = {"observation_space": env.single_observation_space, "agents": 1}
            return space | {"action_space": env.single_action_space}

    vecenv.register("BATCH", lambda *_, **__: Batch())
    env_configurations.register("batch", {"vecenv_type": "BATCH", "env_creator": lambda **_: None})
    base = a2c.DiscreteA2CBase if task.discrete else a2c.ContinuousA2CBase
    plain_epoch = base.train_epoch

    def train_epoch(agent: Any) -> Any:
        results = plain_epoch(agent)
        lengths = agent.game_lengths
        length = float(lengths.get_mean()) if lengths.current_size else None
        turns.next(collect_s=results[1], update_s=results[2], episode_length=length)
        return results

    base.train_epoch = train_epoch
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner()
        runner.load({"params": rl_games_parameters(task, args, folder)})
        runner.run({"train": True, "play": False})


def rl_games_parameters(task: Task, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the parameters that rl_games usually reads from a YAML file."""
    default = {"name": "default"}
    gaussian = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": default,
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
    units = task.hidden_size
    mlp = {"units": [units], "activation": "tanh", "initializer": default}
    config = {
        "name": "comparison",
        "env_name": "batch",
        "train_dir": folder,
        "reward_shaper": {"scale_value": 1.0},
        "normalize_advantage": True,
        "normalize_input": False,
        "gamma": GAMMA,
        "tau": GAE_LAMBDA,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": None,
        "score_to_win": 1e9,
        "truncate_grads": True,
        "grad_norm": MAX_GRAD_NORM,
        "entropy_coef": ENT_COEF,
        "critic_coef": VF_COEF,
        "e_clip": CLIP,
        "clip_value": False,
        "num_actors": NUM_ENVS,
        "horizon_length": NUM_STEPS,
        "minibatch_size": MINIBATCH_STEPS,
        "mini_epochs": EPOCHS,
        "seq_length": BPTT_STEPS,
        "device": args.device,
        "device_name": args.device,
        "max_epochs": 10**9,
        "save_best_after": 10**9,
        "print_stats": False,
    }
    return {
        "seed": 1,
        "torch_threads": args.threads,
        "algo": {"name": "a2c_discrete" if task.discrete else "a2c_continuous"},
        "model": {"name": "discrete_a2c" if task.discrete else "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": False,
            "space": {"discrete": None} if task.discrete else {"continuous": gaussian},
            "mlp": mlp | {"regularizer": {"name": "None"}},
            "rnn": {"name": "lstm", "units": units, "layers": 1, "before_mlp": True},
        },
        "config": config,
    }


# ---- sb3-contrib


def sb3(task: Task, args: argparse.Namespace) -> None:
    """Train with sb3-contrib's RecurrentPPO; actor and critic share one LSTM."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

    turns = Turns(f"sb3-contrib {version('sb3-contrib')}")

    class Batch(DummyVecEnv):
        def __init__(self, env: Any) -> None:
            self.env, self.envs = env, [env] * NUM_ENVS
            VecEnv.__init__(self, NUM_ENVS, env.single_observation_space, env.single_action_space)

        def reset(self) -> Any:
            return self.env.reset(seed=1)[0]

        def step_wait(self) -> Any:
            obs, rewards, terminated, truncated, info = self.env.step(self.actions)
            infos: list[dict[str, Any]] = [{} for _ in range(NUM_ENVS)]
            for row in np.flatnonzero(terminated | truncated):
                infos[row]["terminal_observation"] = info["final_obs"][row]
            return obs, rewards.astype(np.float32), terminated | truncated, infos

    class Iterations(BaseCallback):
        began = collected = 0.0

        def _on_rollout_start(self) -> None:  # the previous iteration has ended
            lengths = [episode["l"] for episode in self.model.ep_info_buffer or ()]
            turns.next(
                collect_s=self.collected - self.began,
                update_s=time.perf_counter() - self.collected,
                episode_length=float(np.mean(lengths)) if lengths else None,
            )
            self.began = time.perf_counter()

        def _on_rollout_end(self) -> None:
            self.collected = time.perf_counter()

        def _on_step(self) -> bool:
            return True

    size = task.hidden_size
    env: Any = Batch(StockLikeVectorEnv(NUM_ENVS))
    if task.discrete:
        env_id = "Frames-v0" if task.pixels else "CartPole-v1"
        env = make_vec_env(env_id, n_envs=task.num_envs, seed=1)
    model = RecurrentPPO(
        "CnnLstmPolicy" if task.pixels else "MlpLstmPolicy",
        env,
        n_steps=NUM_STEPS,
        batch_size=task.steps // MINIBATCHES,
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        ent_coef=ENT_COEF,
        vf_coef=VF_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={
            "lstm_hidden_size": size,
            "shared_lstm": True,
            "enable_critic_lstm": False,
            "net_arch": {"pi": [size], "vf": [size]},  # each head has a tanh layer
        },
        device=args.device,
        seed=1,
    )
    model.learn(total_timesteps=10**9, callback=Iterations())


# ---- skrl


def skrl(task: Task, args: argparse.Namespace) -> None:
    """Train skrl's PPO_RNN with a model like that in the LSTM example of its documentation."""
    from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils import set_seed

    turns = Turns(f"skrl {version('skrl')}")
    set_seed(1)
    envs: Any = vector_env(task)
    envs.device = args.device  # the wrapper reads it
    env = wrap_env(envs, wrapper="gymnasium")
    mixin: Any = CategoricalMixin if task.discrete else GaussianMixin
    size = task.hidden_size
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}

    class Shared(mixin, DeterministicMixin, Model):
        """A policy and a value function that share one pass of the LSTM."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces, device=args.device)
            mixin.__init__(self, role="policy")
            DeterministicMixin.__init__(self, role="value")
            self.lstm = nn.LSTM(task.num_obs, size, batch_first=True)
            self.layer = nn.Sequential(nn.Linear(size, size), nn.Tanh())
            self.heads = nn.ModuleDict(
                {"policy": nn.Linear(size, task.num_actions), "value": nn.Linear(size, 1)}
            )
            self.log_std = nn.Parameter(torch.zeros(task.num_actions))
            self.kept: Any = None  # the policy's features and state, which the value head reuses

        def get_specification(self) -> dict[str, Any]:
            sizes = [(1, NUM_ENVS, size)] * 2
            return {"rnn": {"sequence_length": BPTT_STEPS, "sizes": sizes}}

        def act(self, inputs: dict[str, Any], *, role: str) -> Any:
            return (mixin if role == "policy" else DeterministicMixin).act(self, inputs, role=role)

        def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
            features, state = self.kept or self.features(inputs)
            self.kept = (features, state) if role == "policy" else None
            others = {"rnn": state}
            if role == "policy" and not task.discrete:
                others["log_std"] = self.log_std
            return self.heads[role](features), others

        def features(self, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
            """Run the LSTM; in training, start from stored states and reset at episode ends."""
            state, obs = inputs["rnn"], inputs["observations"]
            if not self.training:
                outputs, after = self.lstm(obs[:, None], (state[0], state[1]))
                return self.layer(outputs.flatten(0, 1)), list(after)
            steps = obs.unflatten(0, (-1, BPTT_STEPS))  # [sequences, L, F]
            first = [part.unflatten(1, (-1, BPTT_STEPS))[:, :, 0] for part in state]
            hidden, cell = (part.contiguous() for part in first)
            ended = (inputs["terminated"] | inputs["truncated"]).view(-1, BPTT_STEPS)
            cuts = ended[:, :-1].any(0).nonzero()[:, 0] + 1
            bounds = [0, *cuts.tolist(), BPTT_STEPS]
            pieces = []
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
                piece, (hidden, cell) = self.lstm(steps[:, begin:end], (hidden, cell))
                pieces.append(piece)
                keep = ~ended[:, end - 1, None]
                hidden, cell = hidden * keep, cell * keep
            return self.layer(torch.cat(pieces, 1).flatten(0, 1)), [hidden, cell]

    model = Shared()
    config = PPO_CFG()
    config.rollouts, config.learning_epochs, config.mini_batches = NUM_STEPS, EPOCHS, MINIBATCHES
    config.learning_rate, config.discount_factor = LEARNING_RATE, GAMMA
    config.gae_lambda, config.grad_norm_clip, config.ratio_clip = GAE_LAMBDA, MAX_GRAD_NORM, CLIP
    config.entropy_loss_scale, config.value_loss_scale = ENT_COEF, VF_COEF
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    agent = PPO_RNN(
        models={"policy": model, "value": model},
        memory=RandomMemory(memory_size=NUM_STEPS, num_envs=NUM_ENVS, device=args.device),
        cfg=config,
        **spaces,
        device=args.device,
    )
    plain, ended = agent.update, [time.perf_counter()]

    def update(**kwargs: Any) -> None:
        began = time.perf_counter()
        plain(**kwargs)
        turns.next(collect_s=began - ended[0], update_s=time.perf_counter() - began)
        ended[0] = time.perf_counter()

    agent.update = update
    steps = {"timesteps": 10**9, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=steps).train()


DRIVERS = {run.__name__: run for run in (ours, clean, bare, rl_games, sb3, skrl)}


def main() -> None:
    """Train one iteration for each line on stdin; stop when stdin is closed."""
    parser = parser_of(__doc__)
    parser.add_argument("driver", choices=DRIVERS)
    parser.add_argument("task", choices=TASKS, nargs="?", default="cartpole")
    for name in ("threads", "ranks"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    DRIVERS[args.driver](TASKS[args.task], args)


if __name__ == "__main__":
    main()
