"""A loop in the manner of CleanRL's ppo_atari_lstm.py: the LSTM step by step, with masks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from tasks import vector_env
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from turns import (
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


class Agent(nn.Module):
    """LSTM, tanh layer, two heads."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        size = task.hidden_size
        self.discrete = task.discrete
        self.lstm = nn.LSTM(task.num_obs, size)
        self.layer = nn.Sequential(nn.Linear(size, size), nn.Tanh())
        self.actor, self.critic = nn.Linear(size, task.num_actions), nn.Linear(size, 1)
        self.log_std = nn.Parameter(torch.zeros(task.num_actions))

    def features(
        self, obs: Tensor, state: tuple[Tensor, Tensor], starts: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Step by step, [T * B, H], resetting the state [1, B, H] where episodes start."""
        num_envs = state[0].shape[1]
        outputs = []
        steps = obs.unflatten(0, (-1, num_envs)), starts.unflatten(0, (-1, num_envs))
        for one, start in zip(*steps, strict=True):
            goes_on = (1.0 - start)[None, :, None]
            output, state = self.lstm(one[None], (goes_on * state[0], goes_on * state[1]))
            outputs.append(output)
        return self.layer(torch.cat(outputs).flatten(0, 1)), state

    def forward(
        self, obs: Tensor, state: Any, starts: Tensor, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        """Return actions, their log probabilities, entropies, values and the state after."""
        features, state = self.features(obs, state, starts)
        outputs = self.actor(features)
        if self.discrete:
            found: Any = Categorical(logits=outputs)
        else:
            found = Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1)
        actions = found.sample() if actions is None else actions
        value = self.critic(features)[:, 0]
        return actions, found.log_prob(actions), found.entropy(), value, state


@torch.no_grad()
def collect(agent: Agent, envs: Any, carry: dict[str, Any]) -> dict[str, Tensor]:
    """One rollout, each [T, B, ...], with advantages and returns."""
    steps: dict[str, list[Tensor]] = {}
    obs, starts, state = carry["obs"], carry["starts"], carry["state"]
    for _ in range(NUM_STEPS):
        actions, logprobs, _, values, state = agent(obs, state, starts)
        step = {"obs": obs, "starts": starts, "actions": actions, "logprobs": logprobs}
        raw_obs, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        step |= {"values": values, "rewards": torch.tensor(rewards, dtype=torch.float32)}
        for name, value in step.items():
            steps.setdefault(name, []).append(value)
        obs = torch.as_tensor(raw_obs)
        starts = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
    rollout = {name: torch.stack(values) for name, values in steps.items()}
    next_value = agent(obs, state, starts)[3]
    carry.update(obs=obs, starts=starts, state=state)

    values, rewards = rollout["values"], rollout["rewards"]
    advantages, last = torch.zeros_like(values), torch.zeros(NUM_ENVS)
    for t in reversed(range(NUM_STEPS)):
        is_last = t == NUM_STEPS - 1
        goes_on = 1.0 - (starts if is_last else rollout["starts"][t + 1])
        after = next_value if is_last else values[t + 1]
        delta = rewards[t] + GAMMA * after * goes_on - values[t]
        advantages[t] = last = delta + GAMMA * GAE_LAMBDA * goes_on * last
    return rollout | {"advantages": advantages, "returns": advantages + values}


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: dict[str, Tensor], state: Any
) -> None:
    """Run the epochs over minibatches of whole environments."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(NUM_ENVS).chunk(MINIBATCHES):
            own = {name: values[:, rows].flatten(0, 1) for name, values in rollout.items()}
            before = state[0][:, rows], state[1][:, rows]
            _, logprobs, entropy, values, _ = agent(
                own["obs"], before, own["starts"], own["actions"]
            )
            ratio = (logprobs - own["logprobs"]).exp()
            advantages = own["advantages"]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
            policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
            value_loss = 0.5 * (values - own["returns"]).square().mean()
            loss = policy_loss - ENT_COEF * entropy.mean() + VF_COEF * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    turns = Turns(trainer="CleanRL-style loop", torch=torch.__version__)
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    envs = vector_env(task.name, NUM_ENVS)
    agent = Agent(task)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    zeros = torch.zeros(1, NUM_ENVS, task.hidden_size)
    obs = torch.as_tensor(envs.reset(seed=1)[0])
    carry: dict[str, Any] = {"obs": obs, "starts": torch.ones(NUM_ENVS), "state": (zeros, zeros)}
    while True:
        began = time.perf_counter()
        state = carry["state"]
        rollout = collect(agent, envs, carry)
        collected = time.perf_counter()
        update(agent, optimizer, rollout, state)
        done = time.perf_counter()
        length = rollout["starts"].numel() / max(float(rollout["starts"].sum()), 1.0)
        turns.next(collect_s=collected - began, update_s=done - collected, episode_length=length)


if __name__ == "__main__":
    main()
