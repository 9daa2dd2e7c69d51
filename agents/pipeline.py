"""The other form of hybrid: the cascade in two stages, on pairs of ranks.

The first rank of a pair trains the feature LSTM, the second one actor and critic: each holds gradients, optimizer
state and activations of its stage only. A pair works on the slots of both its ranks, as microbatches that
`torch.distributed.pipelining` moves from stage to stage; a stage's gradients are averaged over the pairs. While
collecting every rank acts with the whole policy: after an update, a pair exchanges the parameters of its stages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from agents.lstm import run_sequence
from agents.policy import Evaluation, Policy
from agents.rollout import Minibatch, equal_parts
from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import GRADIENT_BYTES_LOGGED, Strategy
from rl_dist.process_group.world import World

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

STAGES = 2
FEATURES, DECISIONS = range(STAGES)
# What a stage must know of a slot; the loss is computed at the end of the second one.
NEEDED = (
    ("obs", "episode_start", "lstm_state"),
    ("actions", "logprobs", "values", "advantages", "returns", "episode_start", "lstm_state"),
)
NO_CASCADE = "hybrid_form pipeline cuts a cascade of LSTMs in two: use --policy clstm, or --strategy ddp"
LossOf = Callable[[Evaluation, Minibatch], tuple[Tensor, ...]]  # the first is the one to minimise
logger = logging.getLogger(__name__)


def make_strategy(config: StrategyConfig, world: World) -> Strategy:
    """What a configuration asks for, the pipeline of the cascade included."""
    return PipelineStrategy(config, world) if config.pipelined else Strategy(config, world)


def stage_of(name: str) -> int:
    """Which stage trains the policy's parameter of this name."""
    return FEATURES if name.startswith("feature_") else DECISIONS


class Stage(nn.Module):
    """One half of the policy; it finds all but the features by a microbatch's number."""

    def __init__(self, policy: Policy, world: World) -> None:
        super().__init__()
        self.policy, self.world = policy, world
        self.microbatches: Sequence[Minibatch] = ()
        self.loss_of: LossOf = lambda evaluation, slots: ()

    def microbatch(self, number: Tensor) -> Minibatch:
        """The microbatch of a number [1]."""
        self.world.beat()
        return self.microbatches[int(number)]

    def starts(self, slots: Minibatch) -> Tensor:
        """Where the state begins anew, [L, N]: at every step of a policy without memory."""
        return slots.episode_start if self.policy.config.memory else torch.ones_like(slots.episode_start)


class FeatureStage(Stage):
    """The feature LSTM and its layer: features [L, N, H] of a microbatch."""

    def forward(self, number: Tensor) -> Tensor:
        slots = self.microbatch(number)

        def network(obs: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            features, _ = self.policy.features(obs, state.transpose(0, 1).contiguous())
            return (features,), state

        return run_sequence(network, slots.obs, slots.lstm_state[:, 4:], self.starts(slots))[0]


class DecisionStage(Stage):
    """Actor, critic and loss: its terms [K] for a microbatch's features [L, N, H]."""

    def forward(self, features: Tensor, *, number: Tensor) -> Tensor:
        slots = self.microbatch(number)

        def network(features: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            outputs, _ = self.policy.decisions(features, state.transpose(0, 1).contiguous())
            return outputs, state

        actor, values = run_sequence(network, features, slots.lstm_state[:, :4], self.starts(slots))
        return torch.stack(self.loss_of(self.policy.evaluate(actor, values, slots.actions), slots))


def first_term(terms: Tensor, number: Tensor) -> Tensor:
    """The loss to minimise; one that is not finite makes its whole gradient NaN."""
    one = torch.ones_like(terms[0])
    return terms[0] * torch.where(torch.isfinite(terms[0]), one, one * torch.nan)


class PipelineStrategy(Strategy):
    """Trains a cascaded policy in two stages on pairs of ranks.

    Gradients come of `gradients` alone, on all ranks together: there is no loss to call `backward` of.
    """

    def __init__(self, config: StrategyConfig, world: World) -> None:
        super().__init__(config, world)
        self.num_pairs = world.size // STAGES
        with world.waiting("start of the pipeline"):
            shape, names = (self.num_pairs, STAGES), ("replicate", "stage")
            mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        self.stage: int = mesh.get_local_rank("stage")
        self.pair, self.replicas = mesh.get_group("stage"), mesh.get_group("replicate")
        self.stages: tuple[list[nn.Parameter], ...] = ()  # the parameters of each
        self.own: list[nn.Parameter] = []  # those of this rank's stage
        self.half: Stage | None = None  # of the policy
        self._schedules: dict[tuple[int, ...], Schedule1F1B] = {}
        self._grad_norm = torch.zeros(())

    def wrap(self, module: nn.Module) -> nn.Module:
        """The policy itself, whose stages now train together.

        Raises:
            UserError: it is no cascade.
        """
        if not isinstance(module, Policy) or module.config.policy != "clstm":
            raise UserError(NO_CASCADE)
        named = list(module.named_parameters())
        self.stages = tuple([value for name, value in named if stage_of(name) == stage] for stage in range(STAGES))
        self.parameters, self.own = list(module.parameters()), self.stages[self.stage]
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in self.own)
        logger.info(GRADIENT_BYTES_LOGGED, self.gradient_bytes)
        with self.world.waiting("start of the pipeline"):
            for parameter in self.parameters:
                dist.broadcast(parameter.detach(), src=0)
        self.half, self.module = (FeatureStage, DecisionStage)[self.stage](module, self.world), module
        return module

    def scheduled(self, minibatch: Minibatch, num_parts: int, loss_of: LossOf, num_terms: int) -> Tensor:
        """Add the gradient of the mean loss over the minibatches of all ranks.

        Each rank gets that of its stage. A loss that is not finite spoils the gradient, which tells the other ranks.

        Args:
            minibatch: of this rank; all ranks have equally many slots.
            num_parts: microbatches to make of each rank's.
            loss_of: terms of the loss, scalars.
            num_terms: how many.

        Returns:
            The terms of this rank's own slots, [num_parts, num_terms] float64.
        """
        theirs = self._slots_of_partner(minibatch)
        whole = (minibatch, theirs) if self.stage == FEATURES else (theirs, minibatch)
        microbatches = [part for slots in whole for part in equal_parts(slots, num_parts)]
        with self.world.reducing("pipeline"):
            terms = self._run(microbatches, loss_of, num_terms)
            self.world.gradients_ready()
            self._average_over_pairs()
            norm = get_total_norm([p.grad for p in self.own if p.grad is not None])
            told = torch.cat([norm.double().square()[None], terms.double()])
            dist.all_reduce(told, group=self.pair)  # the other stage's norm; losses are known to the second only
        self._grad_norm = told[0].sqrt()
        return told[1:].unflatten(0, (STAGES, num_parts, num_terms))[self.stage]

    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf) -> tuple[Tensor, bool]:
        """Clip by the norm over both stages and step this one, on all ranks or on none."""
        self._forget_other_stage(optimizer)
        stepped = bool(torch.isfinite(self._grad_norm))  # the same on all ranks
        if stepped:
            clip_grads_with_norm_(self.own, max_grad_norm, self._grad_norm.to(self.own[0].dtype))
            optimizer.step()
        self.steps += stepped
        self.skipped += not stepped
        return self._grad_norm, stepped

    @torch.no_grad()
    def end_update(self) -> None:
        """Give each rank of a pair what the other one has trained."""
        with self.world.waiting("exchange of parameters"):
            for stage, parameters in enumerate(self.stages):
                flat = torch.cat([parameter.flatten() for parameter in parameters])
                dist.broadcast(flat, group=self.pair, group_src=stage)
                if stage != self.stage:
                    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                        parameter.copy_(part.view_as(parameter))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole `state_dict`, of both stages; all ranks must call."""
        self._fetch_other_stage(optimizer)
        state = optimizer.state_dict()
        self._forget_other_stage(optimizer)
        return state

    def stats(self) -> dict[str, Any]:
        """Those of every strategy, of this rank's stage, and which one that is."""
        return super().stats() | {"stage": self.stage, "pairs": self.num_pairs}

    def _fetch_other_stage(self, optimizer: torch.optim.Optimizer) -> None:
        own = optimizer.state.get(self.own[0], {})  # both stages have stepped, or neither
        with self.world.waiting("exchange of optimizer state"):
            for stage, parameters in enumerate(self.stages):
                for parameter in parameters:
                    if stage != self.stage:
                        optimizer.state[parameter] = {
                            name: _like(value, parameter, self.own[0]) for name, value in own.items()
                        }
                    for name in own:
                        self._broadcast(optimizer.state[parameter][name], stage)

    def _forget_other_stage(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.stages[1 - self.stage]:
            optimizer.state.pop(parameter, None)

    def _broadcast(self, tensor: Tensor, stage: int) -> None:
        moved = tensor.to(self.world.device)  # Adam may count steps on the CPU
        dist.broadcast(moved, group=self.pair, group_src=stage)
        tensor.copy_(moved)

    def _slots_of_partner(self, minibatch: Minibatch) -> Minibatch:
        """The partner's minibatch, as far as this stage needs it; nobody reads the rest, which is this rank's."""
        needed, sent, partner = NEEDED[self.stage], NEEDED[1 - self.stage], 1 - self.stage
        received = {name: torch.empty_like(getattr(minibatch, name)) for name in needed}
        calls = [
            *(dist.P2POp(dist.isend, getattr(minibatch, name), group=self.pair, group_peer=partner) for name in sent),
            *(dist.P2POp(dist.irecv, tensor, group=self.pair, group_peer=partner) for tensor in received.values()),
        ]
        with self.world.waiting("exchange of slots"):
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return replace(minibatch, **received)

    def _run(self, microbatches: Sequence[Minibatch], loss_of: LossOf, num_terms: int) -> Tensor:
        """Forward and backward of all microbatches; the terms of their losses in turn, zeros in the first stage."""
        assert self.half is not None
        self.half.microbatches, self.half.loss_of = microbatches, loss_of
        numbers = torch.arange(len(microbatches))
        schedule = self._schedule(len(microbatches), microbatches[0].episode_start.shape, num_terms)
        if self.stage == FEATURES:
            schedule.step(numbers)
            terms = self.own[0].new_zeros(len(microbatches) * num_terms)
        else:
            terms = schedule.step(number=numbers, target=numbers)
        self.half.microbatches = ()
        return terms.detach()

    def _schedule(self, count: int, shape: torch.Size, num_terms: int) -> Schedule1F1B:
        """One forward and one backward in turn over so many microbatches [L, N], whose tensors' sizes are known."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # seconds to import

        key = (count, *shape)
        if key not in self._schedules:
            assert self.half is not None
            like, width = self.own[0].to("meta"), self.half.policy.config.hidden_size
            number = torch.empty(1, dtype=torch.int64, device="meta")
            features = like.new_empty(*shape, width, requires_grad=True)
            boundary = ((number,), (features,), (like.new_empty(num_terms, requires_grad=True),))
            stage = PipelineStage(
                self.half,
                self.stage,
                STAGES,
                self.world.device,
                input_args=boundary[self.stage],
                output_args=boundary[self.stage + 1],
                group=self.pair,
            )
            self._schedules[key] = Schedule1F1B(stage, count, loss_fn=first_term)
        return self._schedules[key]

    def _average_over_pairs(self) -> None:
        """The mean of this stage's gradients over all pairs."""
        if self.num_pairs == 1:
            return
        gradients = [p.grad for p in self.own if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.replicas)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient) / self.num_pairs)


def _like(value: Tensor, parameter: nn.Parameter, owner: nn.Parameter) -> Tensor:
    """Room for an optimizer's tensor about `parameter`, such as `value` is about `owner`."""
    return torch.empty_like(parameter, dtype=value.dtype) if value.shape == owner.shape else torch.empty_like(value)
