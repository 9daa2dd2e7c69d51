"""The memory of a training, computed and measured, and the sizes that fit.

Computed figures count the tensors that `agents.trainer` holds at the moments that can be the
largest: at the end of a rollout, and between forward and backward of a minibatch.
"""

from __future__ import annotations

import math
import tempfile
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agents.network.noise import CELLS
from agents.network.sequences import PackedRows, plan_pieces
from agents.policy import Policy, PolicyConfig
from agents.sizes import Sizes, TrainConfig, shard_sizes
from agents.trainer import Job, MakeEnv, Training, train
from envs.vector.layout import Layout, random_actions
from rl_dist.process_group.world import StopFlag, World
from rl_dist.telemetry.metrics import NullWriter

LOSS_TERMS = 8  # tensors [L, N] that the loss and its gradient hold
ACTION_TERMS = {True: 2, False: 6}  # tensors [L, N, A] of the log-probability; discrete or not
# tensors [T, B, A] of the actor's outputs when a rollout ends: listed, stacked, log-probabilities
ACTOR_TERMS = {True: 3, False: 7}
# of every number of a rollout's noise: its random words, and then what it is made of; of every
# counter that is drawn at once
WORD_BYTES = {True: 16, False: 8}
DRAWN_BYTES = {True: 24, False: 40}
PHILOX_BYTES = 64
# per unit and step, that ATen's own LSTM keeps for its backward pass; of cuDNN's this is a guess
NATIVE_FLOATS = 6
SCAN_FLOATS = 5  # per unit and step, that a minGRU keeps, and 2 more for every round of its scan
SAMPLE_ENVS = 4
SAMPLE_STEPS = 400
SAMPLE_S = 1.0


@dataclass(frozen=True)
class Shapes:
    """What memory depends on besides the sizes of a training."""

    layout: Layout
    action_space: spaces.Space
    obs_itemsize: int = 4  # bytes of one number of the environment's observations
    env_bytes: int = 0  # tensors that the environments hold, such as market data
    episode_length: float = math.inf  # mean steps: short episodes cut sequences into padded pieces

    @property
    def num_obs(self) -> int:
        """Numbers in an observation."""
        return self.layout.size

    @property
    def num_actions(self) -> int:
        """Numbers that the actor puts out."""
        return spaces.utils.flatdim(self.action_space)

    @property
    def discrete(self) -> bool:
        """Whether actions are choices."""
        return not isinstance(self.action_space, spaces.Box)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of tensors on one rank at the largest moment."""

    parts: dict[str, int]  # parameters, gradients, optimizer, environment, rollout, activations
    moment: str  # "collect" or "update"

    @property
    def peak(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


# ---- computed


def count_parameters(policy: PolicyConfig, layout: Layout, space: spaces.Space) -> int:
    """Count the numbers in a policy's parameters."""
    with torch.device("meta"):
        return sum(each.numel() for each in Policy(policy, layout, space).parameters())


def compute_memory(
    policy: PolicyConfig,
    train: TrainConfig,
    sizes: Sizes,
    shapes: Shapes,
    *,
    itemsize: int = 4,
    device_type: str = "cpu",
) -> MemoryNeed:
    """Compute the memory that one rank with these sizes needs.

    Args:
        itemsize: bytes of a parameter.
        device_type: "cuda" counts what cuDNN keeps in place of oneDNN, an estimate that no GPU has
            confirmed.
    """
    with torch.device("meta"):
        example = Policy(policy, shapes.layout, shapes.action_space)
    parameters = itemsize * sum(each.numel() for each in example.parameters())
    steps = train.num_steps * sizes.num_envs
    # of one step: observations, action, recurrent state
    seen = max(policy.feature_window, 1) * shapes.num_obs * itemsize
    digits = len(example.action_sizes) or 1
    action = 8 * digits if shapes.discrete else shapes.num_actions * itemsize
    state = example.num_states * policy.hidden_size * itemsize
    raw = shapes.num_obs * shapes.obs_itemsize

    # rewards, return and length of 8 bytes, three flags
    listed = seen + raw + action + 2 * itemsize + 27
    rollout = steps * (listed + itemsize) + sizes.num_envs * sizes.sequences_per_env * state
    # while collecting: what comes after every step, the noise, the actor's outputs
    actors = (1 + ACTOR_TERMS[shapes.discrete]) * shapes.num_actions * itemsize
    # the last rollout is still there
    collecting = rollout + steps * (listed + raw + state + actors) + rollout
    drawn = steps * shapes.num_actions
    words = drawn * WORD_BYTES[shapes.discrete]
    words += PHILOX_BYTES * min(CELLS[device_type], drawn // 2 + steps)
    drawing = rollout + max(words, drawn * DRAWN_BYTES[shapes.discrete])
    picked = steps * (seen + action + 4 * itemsize + 1 + 8 + 2 * itemsize)
    columns = sizes.batch_size // sizes.num_microbatches
    cells = train.bptt_steps * columns
    minibatch = cells * (seen + action + 4 * itemsize + 1) + columns * state
    minibatch *= sizes.num_microbatches  # the whole step's batch is picked out at once
    terms = LOSS_TERMS + ACTION_TERMS[shapes.discrete] * shapes.num_actions
    minibatch += cells * itemsize * terms
    native = device_type == "cuda" or itemsize == 8  # oneDNN has no float64
    packs = example.resets_inside and device_type == "cpu"
    sample = min(columns, 256)
    cut = _pieces(shapes.episode_length, train.bptt_steps, sample, example.call_steps, packs)
    forward, backward = _network_bytes(example, train.bptt_steps, columns, itemsize, native, cut)
    forward += max(0, backward - parameters)  # the last gradients are gone by then
    moments = {
        "collect": (max(collecting, drawing), 0),
        "update": (rollout + picked, minibatch + forward),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    held, passing = moments[moment]
    parts = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "environment": shapes.env_bytes,
        "rollout": held,
        "activations": passing,
    }
    return MemoryNeed(parts, moment)


def _network_bytes(
    example: Policy,
    length: int,
    columns: int,
    itemsize: int,
    native: bool,
    cut: tuple[float, float, bool],  # by `_pieces`
) -> tuple[int, int]:
    """Return the bytes that networks keep for the backward pass, and that it adds."""
    policy = example.config
    size, window, cells = policy.hidden_size, policy.feature_window, length * columns
    images = _image_floats(example) * itemsize  # of one step
    if policy.policy == "mlp":
        kept = (3 * policy.num_layers + 1) * size * itemsize + images
        return cells * kept, cells * (itemsize * 3 * size + images)
    # every step of a stateless policy is a sequence of its own; others are cut by episode starts
    padded = num_pieces = float(cells)
    copied, is_packed = 5, False
    if not policy.stateless:
        padded, num_pieces, is_packed = columns * cut[0], columns * cut[1], cut[2]
        copied = 3  # states in order, after each LSTM, and those stacked

    def layer(cells: float, columns: float, num_inputs: int) -> float:
        """Return what a layer of a core keeps for its backward pass, outputs aside."""
        if policy.policy == "mingru":  # gates, candidates, and what every round of its scan keeps
            return cells * (SCAN_FLOATS + 2 * math.log2(padded / num_pieces)) * size * itemsize
        if native or policy.policy not in ("clstm", "lstm"):
            return cells * NATIVE_FLOATS * size * itemsize
        wide = max(num_inputs, size)
        # four gates, cell, states, and what oneDNN pads them to
        return cells * 4 * (10 * size + 6 * wide) + columns * 4 * (6 * wide + 4 * size)

    # inputs of every layer of a core but the feature core of a window
    inputs = example.feature_encoder.num_outputs
    firsts = [size, size] if policy.is_cascade else [inputs] * (1 + policy.separate_trunks)
    firsts += [inputs] if policy.is_cascade and not window else []
    widths = firsts + [size] * len(firsts) * (policy.num_layers - 1)
    work = sum(layer(padded, num_pieces, width) for width in widths)
    outputs = padded * (len(widths) + 1) * size * itemsize
    if window:  # every step of a window is kept, and its states
        work += layer(padded * window, padded, inputs)
        outputs += padded * (window + 4) * size * itemsize
    states = num_pieces * copied * example.num_states * size * itemsize
    seen = max(window, 1) * example.num_obs * itemsize
    copies = padded * seen if num_pieces > columns or is_packed else 0
    # weights and inputs beside those of resets
    copies += is_packed * (padded + 4 * size) * sum(widths) * itemsize
    work += padded * images * max(window, 1)
    backward = padded * (size * itemsize + images) + 8 * size * size * itemsize
    return int(work + outputs + states + copies), int(backward)


def _image_floats(example: Policy) -> int:
    """Count the numbers that CNNs keep of one observation for the backward pass."""
    kept = 0
    for part, encoder in zip(
        (part for part in example.layout.parts if part.kind == "image"),
        example.feature_encoder.images,
        strict=True,
    ):
        values = torch.empty(1, *part.shape, device="meta")
        kept += values.numel()
        for each in encoder:  # type: ignore[attr-defined]
            values = each(values)
            kept += values.numel() * isinstance(each, torch.nn.ReLU | torch.nn.Tanh)
    return kept


@lru_cache(maxsize=512)
def _pieces(
    episode_length: float, length: int, columns: int, call_steps: float, resets_inside: bool
) -> tuple[float, float, bool]:
    """Return padded steps and rows of each sequence of such a sample, cut by episode starts.

    And whether the pieces are packed.
    """
    rng = np.random.default_rng(3)
    left = rng.random((1, columns)) * episode_length  # of the episodes under way
    lengths = rng.uniform(0.5, 1.5, (2 * length, columns)) * min(episode_length, length)
    ends = np.concatenate([left, lengths]).cumsum(0)
    inside = ends < length
    starts = np.zeros((length, columns), bool)
    starts[ends[inside].astype(np.int64), inside.nonzero()[1]] = True
    (plan,) = plan_pieces(starts, [np.arange(columns)], call_steps, resets_inside)
    if isinstance(plan, PackedRows):
        num_rows = plan.first.shape[1] / columns
        return plan.num_steps * num_rows, num_rows, True
    counts = [group.table.shape[1] for group in plan] or [columns]
    longest = [group.longest for group in plan] or [length]
    return float(np.dot(counts, longest)) / columns, sum(counts) / columns, False


# ---- measured


class TrackedTensors(TorchDispatchMode):
    """Counts the bytes of all tensors made inside, until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)


def observe_shapes(make_env: MakeEnv) -> Shapes:
    """Make a few environments and act at random, to see what memory depends on."""
    with TrackedTensors() as tracked:
        env: Any = make_env(SAMPLE_ENVS, 0)
        held = tracked.live
    env.action_space.seed(0)
    obs = env.reset(seed=list(range(SAMPLE_ENVS)))[0]
    num_steps = num_ended = 0
    until_s = time.monotonic() + SAMPLE_S
    while num_steps < SAMPLE_STEPS and time.monotonic() < until_s:
        actions = torch.as_tensor(random_actions(env, obs.cpu()))
        obs, _, terminated, truncated, _ = env.step(actions.to(obs.device))
        num_steps += 1
        num_ended += int((terminated | truncated).sum())
    env.close()
    return Shapes(
        layout=env.layout,
        action_space=env.single_action_space,
        obs_itemsize=obs.element_size(),
        env_bytes=held,
        episode_length=SAMPLE_ENVS * num_steps / num_ended if num_ended else math.inf,
    )


def dry_run(job: Job, world: World) -> int:
    """Train two iterations of one epoch each; return the peak bytes of tensors.

    On CPU every tensor is tracked; on a GPU torch's own allocator counts.
    """
    budget = (
        2 * shard_sizes(job.train, world.rank, world.size).global_num_envs * job.train.num_steps
    )
    saving = {"validate_every": 0, "checkpoint_every": 10**9, "keep_best": "off"}
    short = replace(job.train, total_steps=budget, **saving)  # type: ignore[arg-type]
    one_epoch = replace(job.ppo, update_epochs=1)
    on_gpu = world.device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="dry_run_") as folder:
        job = replace(job, train=short, ppo=one_epoch, run_dir=Path(folder), validate=None)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(world.device)
        with nullcontext() if on_gpu else TrackedTensors() as tracked:
            training = Training(job, world)
            train(training, NullWriter(), StopFlag())
    training.env.close()
    return torch.cuda.max_memory_allocated(world.device) if tracked is None else tracked.peak


# ---- what fits


def largest_sizes(
    train: TrainConfig, num_ranks: int, need: Callable[[TrainConfig], int], limit_bytes: int
) -> tuple[int, int]:
    """Find the largest num_envs (same batch_size) and batch_size (default num_envs).

    Args:
        need: peak bytes on one rank of a training of these sizes.
        limit_bytes: that one rank may use.

    Returns:
        Values of the two flags; 0: not even the smallest fits.
    """

    def largest(step: int, flag: str, **others: Any) -> int:
        def too_large(count: int) -> bool:
            changed: dict[str, Any] = others | {flag: step * count}
            return need(replace(train, **changed)) > limit_bytes

        return step * bisect_left(range(1, 10**7 // step), True, key=too_large)

    sequences_per_env = train.num_steps // train.bptt_steps
    ranks = num_ranks if train.scaling == "strong" else 1
    step = math.lcm(ranks, train.batch_size // math.gcd(train.batch_size, sequences_per_env))
    # whole environments for every rank, two minibatches
    unit = ranks * sequences_per_env
    return largest(step, "num_envs"), largest(unit, "batch_size", num_envs=0)
