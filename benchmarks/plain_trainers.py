"""Train with this project, with a plain loop like CleanRL's ppo_atari_lstm.py, or a bare one.

The functions `ours`, `clean` and `bare` are drivers that peers.py runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
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
    NUM_STEPS,
    VF_COEF,
    Task,
    Turns,
    silence,
    vector_env,
)

DRIVER = "BENCHMARK_DRIVER"  # holds the driver's process id and output descriptor


@functools.cache
def our_turns() -> Turns:
    """Return the `Turns` object of this process.

    If the process is a rank that the driver started, the object uses the driver's standard input
    and output.
    """
    number, reports = map(int, os.environ[DRIVER].split())
    if number == os.getpid():
        return Turns("ours", reports=os.fdopen(reports, "w", buffering=1))
    files = Path(f"/proc/{number}/fd")
    orders, answers = (files / "0").open(), (files / str(reports)).open("w", buffering=1)
    return Turns("ours", orders, answers)


def end_of_iteration(moment: Any) -> None:
    """On rank 0, report and wait for the next turn; the other ranks wait for rank 0."""
    metrics = moment.metrics
    if moment.is_main_process:
        our_turns().next(
            collect_s=metrics["time/collect_s"],
            update_s=metrics["time/update_s"],
            episode_length=metrics["episode/length"],
            steps=metrics["global_step"] // metrics["iteration"],
        )


def ours(task: Task, args: argparse.Namespace) -> None:
    """Train with `agents.train`; with --ranks N, N processes divide the work."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # root of the checkout
    from agents import train

    settings: dict[str, Any] = {"num_stocks": 30}
    if not task.cascade:
        settings = {
            "env": "CartPole-v1" if task.discrete else "turns:StockLike-v0",
            "policy": "lstm",
        }
    if task.many or not task.cascade:
        settings |= {
            "hidden_size": task.hidden_size,
            "num_envs": task.num_envs,
            "num_steps": NUM_STEPS,
            "bptt_steps": BPTT_STEPS,
            "batch_size": task.steps // MINIBATCHES // BPTT_STEPS,
            "update_epochs": task.epochs,
            "learning_rate": LEARNING_RATE,
            "anneal_lr": False,
            "gamma": GAMMA,
            "gae_lambda": GAE_LAMBDA,
            "clip_coef": CLIP,
            "ent_coef": ENT_COEF,
            "vf_coef": VF_COEF,
            "max_grad_norm": MAX_GRAD_NORM,
        }
    if task.pixels:
        settings["env"] = "turns:Frames-v0"
    if task.many and task.discrete:
        settings["env"] = "examples.batched_envs:CartPole"
    os.environ[DRIVER] = f"{os.getpid()} {silence()}"
    with tempfile.TemporaryDirectory() as folder:
        train(
            on_iteration=end_of_iteration,
            run_dir=Path(folder, "run"),
            threads=args.threads // args.ranks,
            device=args.device,
            num_gpus=args.ranks,
            total_steps=10**9,
            validate_every=0,
            checkpoint_every=10**9,
            collective_timeout=80_000,  # no timeout while ranks wait for a turn
            **settings,
        )


# ---- a loop like CleanRL's ppo_atari_lstm.py


class PlainAgent(nn.Module):
    """Network of an LSTM, a tanh layer and two heads; for pixels, a CNN comes first."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        size = task.hidden_size
        self.discrete = task.discrete
        self.cnn = nn.Identity() if not task.pixels else nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.pixels = task.pixels
        self.lstm = nn.LSTM(task.num_obs, size)
        self.layer = nn.Sequential(nn.Linear(size, size), nn.Tanh())
        self.actor, self.critic = nn.Linear(size, task.num_actions), nn.Linear(size, 1)
        self.log_std = nn.Parameter(torch.zeros(task.num_actions))

    def forward(
        self, obs: Tensor, state: Any, starts: Tensor, actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        """Run T steps of B rows each; reset the state [1, B, H] at episode starts.

        Returns actions, their log probabilities, entropies, values and the final state.
        """
        num_envs = state[0].shape[1]
        outputs = []
        obs = self.cnn(obs / 255.0 if self.pixels else obs)
        steps = obs.unflatten(0, (-1, num_envs)), starts.unflatten(0, (-1, num_envs))
        for row, start in zip(*steps, strict=True):
            keep = (1.0 - start)[None, :, None]
            output, state = self.lstm(row[None], (keep * state[0], keep * state[1]))
            outputs.append(output)
        features = self.layer(torch.cat(outputs).flatten(0, 1))
        actor = self.actor(features)
        if self.discrete:
            distribution: Any = Categorical(logits=actor)
        else:
            distribution = Independent(Normal(actor, self.log_std.exp().expand_as(actor)), 1)
        actions = distribution.sample() if actions is None else actions
        values = self.critic(features)[:, 0]
        return actions, distribution.log_prob(actions), distribution.entropy(), values, state


@torch.no_grad()
def plain_collect(agent: PlainAgent, envs: Any, carry: dict[str, Any]) -> dict[str, Tensor]:
    """Return one rollout as tensors [T, B, ...], with advantages and returns."""
    steps: list[dict[str, Tensor]] = []
    obs, starts, state = carry["obs"], carry["starts"], carry["state"]
    for _ in range(NUM_STEPS):
        actions, logprobs, _, values, state = agent(obs, state, starts)
        step = {"obs": obs, "starts": starts, "actions": actions, "logprobs": logprobs}
        raw_obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        rewards = starts.new_tensor(rewards)
        steps.append(step | {"values": values, "rewards": rewards})
        obs = torch.as_tensor(raw_obs, device=starts.device)
        starts = starts.new_tensor(np.logical_or(terminated, truncated))
    rollout = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    next_value = agent(obs, state, starts)[3]
    carry.update(obs=obs, starts=starts, state=state)

    values = torch.cat([rollout["values"], next_value[None]])
    keep = 1.0 - torch.cat([rollout["starts"], starts[None]])
    advantages, last = torch.zeros_like(rollout["values"]), torch.zeros_like(starts)
    for t in reversed(range(NUM_STEPS)):
        delta = rollout["rewards"][t] + GAMMA * values[t + 1] * keep[t + 1] - values[t]
        advantages[t] = last = delta + GAMMA * GAE_LAMBDA * keep[t + 1] * last
    return rollout | {"advantages": advantages, "returns": advantages + rollout["values"]}


def plain_update(
    agent: PlainAgent, optimizer: torch.optim.Optimizer, rollout: dict[str, Tensor], state: Any
) -> None:
    """Train for EPOCHS epochs; a minibatch holds all steps of some environments."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(state[0].shape[1]).chunk(MINIBATCHES):
            batch = {name: values[:, rows].flatten(0, 1) for name, values in rollout.items()}
            before = state[0][:, rows], state[1][:, rows]
            _, logprobs, entropy, values, _ = agent(
                batch["obs"], before, batch["starts"], batch["actions"]
            )
            ratio = (logprobs - batch["logprobs"]).exp()
            advantages = batch["advantages"]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
            policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
            value_loss = 0.5 * (values - batch["returns"]).square().mean()
            loss = policy_loss - ENT_COEF * entropy.mean() + VF_COEF * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def clean(task: Task, args: argparse.Namespace) -> None:
    """Train with the plain loop, as in CleanRL."""
    turns = Turns("CleanRL-style loop")
    envs, agent = vector_env(task), PlainAgent(task).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    zeros = torch.zeros(1, task.num_envs, task.hidden_size, device=args.device)
    obs = torch.as_tensor(envs.reset(seed=1)[0], device=args.device)
    carry: dict[str, Any] = {
        "obs": obs,
        "starts": zeros.new_ones(task.num_envs),
        "state": (zeros, zeros),
    }
    while True:
        began, state = time.perf_counter(), carry["state"]
        rollout = plain_collect(agent, envs, carry)
        collected = time.perf_counter()
        plain_update(agent, optimizer, rollout, state)
        updated = time.perf_counter()
        length = task.steps / max(float(rollout["starts"].sum()), 1.0)
        turns.next(collect_s=collected - began, update_s=updated - collected, episode_length=length)


# ---- the least work of a recurrent PPO with thousands of environments


class BareAgent(nn.Module):
    """The layers of our trainer's network, without resets inside sequences."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        size = task.hidden_size
        plain = PlainAgent(task)
        self.lstm, self.layer, self.critic = plain.lstm, plain.layer, plain.critic
        self.actor = plain.actor
        self.deciding = nn.ModuleList(nn.LSTM(size, size) for _ in range(2 * task.cascade))

    def forward(self, obs: Tensor, states: list[Any]) -> tuple[Tensor, Tensor, list[Any]]:
        """Run L steps of N rows each; return the actor's outputs, values and new states."""
        outputs, state = self.lstm(obs, states[0])
        features = self.layer(outputs)
        parts = [lstm(features, s) for lstm, s in zip(self.deciding, states[1:], strict=True)]
        actor, critic = [outputs for outputs, _ in parts] or [features, features]
        return self.actor(actor), self.critic(critic), [state, *(after for _, after in parts)]


def bare_env(task: Task, device: str) -> Any:
    """Return the environments that our trainer uses."""
    from agents.run.choice import choose_run, parse_training
    from examples.batched_envs import CartPole

    if task.discrete:
        return CartPole(task.num_envs, torch.device(device))
    with ExitStack() as held:
        config = choose_run(parse_training(["--num_stocks=30", "--device", device]), held).config
    return config.prepare_task(lambda: None, device).training_env(task.num_envs, 0)


def bare(task: Task, args: argparse.Namespace) -> None:
    """Act and step; then take as many gradient steps as PPO, of the same sizes, with any loss."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # root of the checkout
    turns = Turns("bare loop")
    envs, agent = bare_env(task, args.device), BareAgent(task).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, fused=True)
    obs = envs.reset(seed=list(range(task.num_envs)))[0].float()
    zeros = torch.zeros(1, task.num_envs, task.hidden_size, device=args.device)
    states: list[Any] = [(zeros, zeros)] * (1 + 2 * task.cascade)
    while True:
        began = time.perf_counter()
        steps = []
        with torch.no_grad():
            for _ in range(NUM_STEPS):
                steps.append(obs)
                outputs, _, states = agent(obs[None], states)
                actions = outputs[0] + torch.randn_like(outputs[0])
                obs = envs.step(actions.argmax(-1) if task.discrete else actions)[0].float()
        collected = time.perf_counter()
        sequences = torch.stack(steps).unflatten(0, (-1, BPTT_STEPS)).transpose(0, 1).flatten(1, 2)
        for _ in range(task.epochs):
            for rows in torch.randperm(sequences.shape[1], device=args.device).chunk(MINIBATCHES):
                first = zeros[:, : len(rows)]
                outputs, values, _ = agent(sequences[:, rows], [(first, first)] * len(states))
                optimizer.zero_grad()
                (outputs.square().mean() + values.square().mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
        del steps, sequences
        turns.next(collect_s=collected - began, update_s=time.perf_counter() - collected)
