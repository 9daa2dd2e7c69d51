"""skrl's PPO_RNN; the model follows the LSTM example of its documentation, shared by both heads."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from tasks import vector_env
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
    MINIBATCHES,
    NUM_ENVS,
    NUM_STEPS,
    VF_COEF,
    Task,
    Turns,
    arguments,
)


def make_model(task: Task, env: Any) -> Any:
    """Return a model for both roles; the LSTM runs once for the two of them."""
    mixin: Any = CategoricalMixin if task.discrete else GaussianMixin
    size = task.hidden_size

    class Shared(mixin, DeterministicMixin, Model):
        def __init__(self) -> None:
            device = torch.device("cpu")
            spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
            Model.__init__(self, **spaces, device=device)
            mixin.__init__(self, role="policy")
            DeterministicMixin.__init__(self, role="value")
            self.lstm = nn.LSTM(task.num_obs, size, batch_first=True)
            self.layer = nn.Sequential(nn.Linear(size, size), nn.Tanh())
            self.heads = nn.ModuleDict(
                {"policy": nn.Linear(size, task.num_actions), "value": nn.Linear(size, 1)}
            )
            self.log_std = nn.Parameter(torch.zeros(task.num_actions))
            self.kept: Any = None  # what the policy's pass leaves for the value's

        def get_specification(self) -> dict[str, Any]:
            sizes = [(1, NUM_ENVS, size)] * 2
            return {"rnn": {"sequence_length": BPTT_STEPS, "sizes": sizes}}

        def act(self, inputs: dict[str, Any], *, role: str) -> Any:
            return (mixin if role == "policy" else DeterministicMixin).act(self, inputs, role=role)

        def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
            features, state = self.kept or self.features(inputs)
            self.kept = (features, state) if role == "policy" else None
            more = {"rnn": state}
            if role == "policy" and not task.discrete:
                more["log_std"] = self.log_std
            return self.heads[role](features), more

        def features(self, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
            """Run the LSTM; in training from the first state of each sequence, cut at ends."""
            state, obs = inputs["rnn"], inputs["observations"]
            if not self.training:
                outputs, after = self.lstm(obs[:, None], (state[0], state[1]))
                return self.layer(outputs.flatten(0, 1)), list(after)
            steps = obs.unflatten(0, (-1, BPTT_STEPS))  # [sequences, L, F]
            first = [one.unflatten(1, (-1, BPTT_STEPS))[:, :, 0] for one in state]
            hidden, cell = (one.contiguous() for one in first)
            ended = (inputs["terminated"] | inputs["truncated"]).view(-1, BPTT_STEPS)
            cuts = ended[:, :-1].any(0).nonzero()[:, 0] + 1
            bounds = [0, *cuts.tolist(), BPTT_STEPS]
            outputs = []
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
                part, (hidden, cell) = self.lstm(steps[:, begin:end], (hidden, cell))
                outputs.append(part)
                goes_on = ~ended[:, end - 1, None]
                hidden, cell = hidden * goes_on, cell * goes_on
            return self.layer(torch.cat(outputs, 1).flatten(0, 1)), [hidden, cell]

    return Shared()


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    turns = Turns(trainer=f"skrl {version('skrl')}", torch=torch.__version__)
    torch.set_num_threads(threads)
    set_seed(1)
    env = wrap_env(vector_env(task.name, NUM_ENVS), wrapper="gymnasium")
    model = make_model(task, env)
    config = PPO_CFG()
    config.rollouts, config.learning_epochs, config.mini_batches = NUM_STEPS, EPOCHS, MINIBATCHES
    config.learning_rate, config.discount_factor = LEARNING_RATE, GAMMA
    config.gae_lambda, config.grad_norm_clip, config.ratio_clip = GAE_LAMBDA, MAX_GRAD_NORM, CLIP
    config.entropy_loss_scale, config.value_loss_scale = ENT_COEF, VF_COEF
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    agent = PPO_RNN(
        models={"policy": model, "value": model},
        memory=RandomMemory(memory_size=NUM_STEPS, num_envs=NUM_ENVS, device="cpu"),
        cfg=config,
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
    )
    plain, ended = agent.update, [time.perf_counter()]

    def update(**kwargs: Any) -> None:
        began = time.perf_counter()
        plain(**kwargs)
        now = time.perf_counter()
        turns.next(collect_s=began - ended[0], update_s=now - began)
        ended[0] = time.perf_counter()

    agent.update = update
    steps = {"timesteps": 10**9, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=steps).train()


if __name__ == "__main__":
    main()
