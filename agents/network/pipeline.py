"""The other form of hybrid: the cascade in two stages, on pairs of ranks.

The first rank of a pair trains the feature LSTM, the second one actor and critic. A pair works on
the sequences of both its ranks, as microbatches that `torch.distributed.pipelining` moves from
stage to stage; a stage's gradients are averaged over the pairs. While collecting every rank acts
with the whole policy: after an update, a pair exchanges the parameters of its stages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.convert_parameters import parameters_to_vector

from agents.network.minibatches import Minibatch
from agents.network.sequences import run_sequence
from rl_dist.errors import UserError
from rl_dist.process_group.join import devices_differ
from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.mesh import make_mesh
from rl_dist.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

    from agents.policy import Evaluation, Policy

STAGES = 2
FEATURES, DECISIONS = range(STAGES)
# fields of a minibatch that a stage needs; the loss is computed at the end of the second one
NEEDED = (
    ("obs", "episode_start", "lstm_state"),
    ("actions", "logprobs", "values", "advantages", "returns", "episode_start", "lstm_state"),
)
NO_CASCADE = (
    "hybrid_form pipeline cuts a cascade of LSTMs in two: use --policy clstm, or --strategy ddp"
)
# the first is the one to minimise
LossOf = Callable[["Evaluation", Minibatch], tuple[Tensor, ...]]
logger = logging.getLogger(__name__)


def stage_of(name: str) -> int:
    """Return which stage trains the policy's parameter of this name."""
    return FEATURES if name.startswith("feature_") else DECISIONS


class Stage(nn.Module):
    """One half of the policy; it finds all but the features by a microbatch's number."""

    def __init__(self, policy: Policy, world: World) -> None:
        super().__init__()
        self.policy = policy
        self.world = world
        self.microbatches: Sequence[Minibatch] = ()
        self.loss_of: LossOf = lambda evaluation, microbatch: ()

    def run(
        self, half: Callable[..., Any], inputs: Tensor, state: Tensor, episode_start: Tensor
    ) -> tuple[Tensor, ...]:
        """Run `Policy.features` or `decisions` over inputs [L, N, ...]."""
        self.world.heartbeat()

        def network(inputs: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            outputs, _ = half(inputs, state.transpose(0, 1).contiguous())
            return (outputs,) if isinstance(outputs, Tensor) else outputs, state

        if not self.policy.config.memory:  # the state is zeroed before every step
            episode_start = torch.ones_like(episode_start)
        return run_sequence(network, inputs, state, episode_start)


class FeatureStage(Stage):
    """The feature LSTM and its layer."""

    def forward(self, number: Tensor) -> Tensor:
        """Return the features [L, N, H] of the microbatch of a number [1]."""
        own = self.microbatches[int(number)]
        state = own.lstm_state[:, self.policy.num_decision_states :]
        return self.run(self.policy.features, own.obs, state, own.episode_start)[0]


class DecisionStage(Stage):
    """Actor, critic and loss."""

    def forward(self, features: Tensor, *, number: Tensor) -> Tensor:
        """Return the terms [K] of a microbatch's loss for its features [L, N, H]."""
        own = self.microbatches[int(number)]
        state = own.lstm_state[:, : self.policy.num_decision_states]
        actor, values = self.run(self.policy.decisions, features, state, own.episode_start)
        return torch.stack(self.loss_of(self.policy.evaluate(actor, values, own.actions), own))


def first_term(terms: Tensor, number: Tensor) -> Tensor:
    """Return the loss to minimise; if it is not finite, its gradient is NaN."""
    one = torch.ones_like(terms[0])
    return terms[0] * torch.where(torch.isfinite(terms[0]), one, one * torch.nan)


class PipelineStrategy(Strategy):
    """Trains a cascaded policy in two stages on pairs of ranks, by `scheduled` alone."""

    def __init__(self, config: StrategyConfig, world: World) -> None:
        super().__init__(config, world)
        self.num_pairs = world.size // STAGES
        with world.waiting("start of the pipeline"):
            self.mesh = make_mesh(world, (self.num_pairs, STAGES))
        self.stage: int = self.mesh.get_local_rank(1)
        self.pair = self.mesh.get_group(1)
        self.replicas = self.mesh.get_group(0)
        self.stages: tuple[list[nn.Parameter], ...] = ()  # the parameters of each
        self.own: list[nn.Parameter] = []  # those of this rank's stage
        self.half: Stage | None = None  # of the policy
        self._schedules: dict[tuple[int, ...], Schedule1F1B] = {}
        self._grad_norm = torch.zeros(())

    def wrap(self, module: Policy) -> Policy:  # type: ignore[override]
        """Return the policy itself, whose stages now train together."""
        if module.config.policy != "clstm":
            raise UserError(NO_CASCADE)
        if module.mask_columns:
            raise UserError("hybrid_form pipeline knows no masks of actions: use --strategy ddp")
        named = list(module.named_parameters())
        self.stages = tuple(
            [p for name, p in named if stage_of(name) == stage] for stage in range(STAGES)
        )
        self.parameters = list(module.parameters())
        self.own = self.stages[self.stage]
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in self.own)
        logger.info("gradients of %d bytes", self.gradient_bytes)
        self.unequal_devices = devices_differ(self.world)
        with self.world.waiting("start of the pipeline"):
            for parameter in self.parameters:
                dist.broadcast(parameter.detach(), src=0)
        self.half = (FeatureStage, DecisionStage)[self.stage](module, self.world)
        self.module = self.bare = module
        return module

    def scheduled(
        self, minibatch: Minibatch, num_microbatches: int, loss_of: LossOf, num_terms: int
    ) -> Tensor:
        """Add this stage's gradient of the mean loss over all ranks' minibatches.

        All ranks have equally many sequences, and make as many microbatches of them. A loss that is
        not finite makes the gradient NaN, which all ranks see.

        Returns:
            The terms of this rank's own sequences, [num_microbatches, num_terms] float64.
        """
        assert self.half is not None
        theirs = self._exchange(minibatch)
        whole = (minibatch, theirs) if self.stage == FEATURES else (theirs, minibatch)
        microbatches = [part for each in whole for part in each.into_microbatches(num_microbatches)]
        self.half.microbatches = microbatches
        self.half.loss_of = loss_of
        numbers = torch.arange(len(microbatches))
        schedule = self._schedule(len(microbatches), microbatches[0].episode_start.shape, num_terms)
        with self.world.reduction_context("pipeline"):
            # forward and backward; the terms are known to the second stage only
            if self.stage == FEATURES:
                schedule.step(numbers)
                terms = self.own[0].new_zeros(len(microbatches) * num_terms)
            else:
                terms = schedule.step(number=numbers, target=numbers).detach()
            self.half.microbatches = ()
            # the mean of this stage's gradients over all pairs
            self.world.gradients_ready()
            gradients = [p.grad for p in self.own if p.grad is not None]
            if self.num_pairs > 1:
                flat = parameters_to_vector(gradients)
                dist.all_reduce(flat, group=self.replicas)
                _copy_from(flat / self.num_pairs, gradients)
            # the norm over both stages
            square = get_total_norm(gradients).double().square()
            shared = torch.cat([square[None], terms.double()])
            dist.all_reduce(shared, group=self.pair)
        self._grad_norm = shared[0].sqrt()
        return shared[1:].unflatten(0, (STAGES, num_microbatches, num_terms))[self.stage]

    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip by the norm over both stages and step this one, on all ranks or on none."""
        self._forget_other_stage(optimizer)
        self._grad_norm = self.agreed_norm(self._grad_norm)
        stepped = torch.isfinite(self._grad_norm)  # the same on all ranks
        if stepped:
            clip_grads_with_norm_(self.own, max_grad_norm, self._grad_norm.to(self.own[0].dtype))
            optimizer.step()
        return self._grad_norm, stepped

    @torch.no_grad()
    def end_update(self) -> None:
        """Give each rank of a pair what the other one has trained."""
        with self.world.waiting("exchange of parameters"):
            for stage, parameters in enumerate(self.stages):
                flat = parameters_to_vector(parameters)
                dist.broadcast(flat, group=self.pair, group_src=stage)
                if stage != self.stage:
                    _copy_from(flat, parameters)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole `state_dict`, of both stages; all ranks must call."""
        first = self.own[0]
        own = optimizer.state.get(first, {})  # empty as long as neither stage has stepped
        with self.world.waiting("exchange of optimizer state") if own else nullcontext():
            for stage, parameter in self._of_stages() if own else ():
                state = optimizer.state[parameter]
                for name, value in own.items():
                    if stage != self.stage:
                        like = parameter if value.shape == first.shape else value
                        state[name] = torch.empty_like(like, dtype=value.dtype)
                    moved = state[name].to(self.world.device)  # Adam may count on the CPU
                    dist.broadcast(moved, group=self.pair, group_src=stage)
                    state[name].copy_(moved)
        whole = optimizer.state_dict()
        self._forget_other_stage(optimizer)
        return whole

    def _of_stages(self) -> Iterator[tuple[int, nn.Parameter]]:
        for stage, parameters in enumerate(self.stages):
            yield from ((stage, parameter) for parameter in parameters)

    def _forget_other_stage(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.stages[1 - self.stage]:
            optimizer.state.pop(parameter, None)

    def _exchange(self, minibatch: Minibatch) -> Minibatch:
        """Return the partner's minibatch, as far as this stage needs it; the rest is never read."""
        peer: dict[str, Any] = {"group": self.pair, "group_peer": 1 - self.stage}
        sent = (getattr(minibatch, name) for name in NEEDED[1 - self.stage])
        received = {n: torch.empty_like(getattr(minibatch, n)) for n in NEEDED[self.stage]}
        calls = [dist.P2POp(dist.isend, tensor, **peer) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, **peer) for tensor in received.values()]
        with self.world.waiting("exchange of sequences"):
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return replace(minibatch, **received)

    def _schedule(self, count: int, shape: torch.Size, num_terms: int) -> Schedule1F1B:
        """Return the schedule, one forward and one backward in turn, of microbatches [L, N]."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # seconds to import

        key = (count, *shape)
        if key not in self._schedules:
            assert self.half is not None
            like = self.own[0].to("meta")
            width = self.half.policy.config.hidden_size
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


def _copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive numbers into tensors."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
