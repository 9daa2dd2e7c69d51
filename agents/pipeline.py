"""PPO on pairs of ranks: strategy hybrid that cuts the cascade into two stages.

The first rank of a pair trains the feature LSTM, the second one actor and critic. A pair works on
the sequences of both its ranks, as microbatches that `torch.distributed.pipelining` moves from
stage to stage; a stage's gradients are averaged over the pairs. While collecting, every rank acts
with the whole policy: after an update, a pair exchanges the parameters of its stages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.convert_parameters import parameters_to_vector

from agents.network.minibatches import Minibatch
from agents.network.pieces import Plan
from agents.network.sequences import run_sequence
from agents.ppo import PPO, LossParts, PPOConfig, ppo_loss
from rl_dist.errors import UserError
from rl_dist.process_group.join import devices_differ
from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.mesh import make_mesh
from rl_dist.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

    from agents.policy import Policy

STAGES = 2
FEATURES, DECISIONS = range(STAGES)
# fields of a minibatch that a stage needs; the second one computes the loss
NEEDED = (
    ("obs", "episode_start", "lstm_state"),
    ("actions", "logprobs", "values", "advantages", "returns", "episode_start", "lstm_state"),
)
logger = logging.getLogger(__name__)


def stage_of(name: str) -> int:
    """Return which stage trains the policy's parameter of this name."""
    return FEATURES if name.startswith("feature_") else DECISIONS


class StageStrategy(Strategy):
    """Clips, steps and saves the two stages; `PipelinePPO` computes gradients."""

    def __init__(self, config: StrategyConfig, world: World) -> None:
        super().__init__(config, world)
        self.num_pairs = world.size // STAGES
        with world.waiting("start of the pipeline"):
            self.mesh = make_mesh(world, (self.num_pairs, STAGES))
        self.stage: int = self.mesh.get_local_rank(1)
        self.pair = self.mesh.get_group(1)
        self.replicas = self.mesh.get_group(0)
        self.stages: tuple[list[nn.Parameter], ...] = ()  # the parameters of each
        self.local: list[nn.Parameter] = []  # those of this rank's stage
        self.grad_norm = torch.zeros(())  # over both stages

    def wrap(self, module: Policy) -> Policy:  # type: ignore[override]
        """Return the policy itself, with the weights of rank 0."""
        if module.config.policy != "clstm" or module.mask_columns:
            raise UserError(
                "hybrid_form pipeline cuts a cascade of LSTMs without masks of actions in two: "
                "use --policy clstm, or --strategy ddp"
            )
        named = list(module.named_parameters())
        self.stages = tuple(
            [p for name, p in named if stage_of(name) == stage] for stage in range(STAGES)
        )
        self.parameters = list(module.parameters())
        self.local = self.stages[self.stage]
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in self.local)
        logger.info("gradients of %d bytes", self.gradient_bytes)
        self.unequal_devices = devices_differ(self.world)
        with self.world.waiting("start of the pipeline"):
            for parameter in self.parameters:
                dist.broadcast(parameter.detach(), src=0)
        self.module = self.bare = module
        return module

    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip by the norm over both stages and step this one, on all ranks or on none."""
        self._forget_other_stage(optimizer)
        grad_norm = self.agreed_norm(self.grad_norm)
        stepped = torch.isfinite(grad_norm)  # the same on all ranks
        if stepped:
            clip_grads_with_norm_(self.local, max_grad_norm, grad_norm.to(self.local[0].dtype))
            optimizer.step()
        return grad_norm, stepped

    @torch.no_grad()
    def exchange_parameters(self) -> None:
        """Give each rank of a pair the parameters that the other one has trained."""
        with self.world.waiting("exchange of parameters"):
            for stage, parameters in enumerate(self.stages):
                flat = parameters_to_vector(parameters)
                dist.broadcast(flat, group=self.pair, group_src=stage)
                if stage != self.stage:
                    copy_from(flat, parameters)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole `state_dict`, of both stages; all ranks must call."""
        first = self.local[0]
        names = list(optimizer.state.get(first, {}))  # none as long as neither stage has stepped
        with self.world.waiting("exchange of optimizer state") if names else nullcontext():
            for stage, parameters in enumerate(self.stages):
                for parameter in parameters if names else ():
                    self._exchange_state(optimizer, stage, parameter, names)
        whole = optimizer.state_dict()
        self._forget_other_stage(optimizer)
        return whole

    def _exchange_state(
        self,
        optimizer: torch.optim.Optimizer,
        stage: int,
        parameter: nn.Parameter,
        names: list[str],
    ) -> None:
        state, first = optimizer.state[parameter], self.local[0]
        for name in names:
            if stage != self.stage:
                value = optimizer.state[first][name]
                like = parameter if value.shape == first.shape else value
                state[name] = torch.empty_like(like, dtype=value.dtype)
            moved = state[name].to(self.world.device)  # Adam may count on the CPU
            dist.broadcast(moved, group=self.pair, group_src=stage)
            state[name].copy_(moved)

    def _forget_other_stage(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.stages[1 - self.stage]:
            optimizer.state.pop(parameter, None)


class Stage(nn.Module):
    """This rank's half of the policy; finds its inputs by a microbatch's number."""

    def __init__(self, policy: Policy, config: PPOConfig, world: World) -> None:
        super().__init__()
        self.policy = policy
        self.config = config
        self.world = world
        self.microbatches: Sequence[Minibatch] = ()

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
        part = self.microbatches[int(number)]
        state = part.lstm_state[:, self.policy.num_decision_states :]
        return self.run(self.policy.features, part.obs, state, part.episode_start)[0]


class DecisionStage(Stage):
    """Actor, critic and loss."""

    def forward(self, features: Tensor, *, number: Tensor) -> Tensor:
        """Return the LossParts [K] of a microbatch for its features [L, N, H]."""
        part = self.microbatches[int(number)]
        state = part.lstm_state[:, : self.policy.num_decision_states]
        actor, values = self.run(self.policy.decisions, features, state, part.episode_start)
        evaluation = self.policy.evaluate(actor, values, part.actions)
        return torch.stack(ppo_loss(evaluation, part, self.config))


def first_term(terms: Tensor, number: Tensor) -> Tensor:
    """Return the loss to minimise; if it is not finite, its gradient is NaN."""
    one = torch.ones_like(terms[0])
    return terms[0] * torch.where(torch.isfinite(terms[0]), one, one * torch.nan)


class PipelinePPO(PPO):
    """PPO whose forward and backward passes move through two stages on two ranks."""

    takes_plans = False
    strategy: StageStrategy

    def __init__(
        self, policy: Policy, config: PPOConfig, strategy: StageStrategy, num_microbatches: int = 1
    ) -> None:
        super().__init__(policy, config, strategy, num_microbatches)
        kind = (FeatureStage, DecisionStage)[strategy.stage]
        self.half = kind(policy, config, self.world)
        self._schedules: dict[tuple[int, ...], Schedule1F1B] = {}

    def gradients(self, minibatch: Minibatch, plans: Sequence[Plan]) -> LossParts:
        """Add this stage's gradient of the mean loss over all ranks' minibatches.

        All ranks have equally many sequences, and cut them into equally many microbatches. A loss
        that is not finite makes the gradient NaN, which all ranks see.
        """
        stage, local = self.strategy.stage, self.strategy.local
        num_terms = len(LossParts._fields)
        theirs = self._exchange(minibatch)
        pair = (minibatch, theirs) if stage == FEATURES else (theirs, minibatch)
        parts = [part for half in pair for part in half.into_microbatches(self.num_microbatches)]
        self.half.microbatches = parts
        numbers = torch.arange(len(parts))
        schedule = self._pipeline(len(parts), parts[0].episode_start.shape)
        with self.world.reduction_context("pipeline"):
            # forward and backward; only the second stage knows the terms
            if stage == FEATURES:
                schedule.step(numbers)
                terms = local[0].new_zeros(len(parts) * num_terms)
            else:
                terms = schedule.step(number=numbers, target=numbers).detach()
            self.half.microbatches = ()
            # the mean of this stage's gradients over all pairs
            self.world.gradients_ready()
            gradients = [p.grad for p in local if p.grad is not None]
            if self.strategy.num_pairs > 1:
                flat = parameters_to_vector(gradients)
                dist.all_reduce(flat, group=self.strategy.replicas)
                copy_from(flat / self.strategy.num_pairs, gradients)
            # the norm over both stages
            square = get_total_norm(gradients).double().square()
            shared = torch.cat([square[None], terms.double()])
            dist.all_reduce(shared, group=self.strategy.pair)
        self.strategy.grad_norm = shared[0].sqrt()
        self.clock.mark("backward")
        terms = shared[1:].unflatten(0, (STAGES, self.num_microbatches, num_terms))
        return LossParts(*terms[stage].mean(0))

    def share_parameters(self) -> None:
        """Give each rank of a pair the parameters that the other one has trained."""
        self.strategy.exchange_parameters()

    def _exchange(self, minibatch: Minibatch) -> Minibatch:
        """Return the partner's minibatch; fields that this stage does not need are not received."""
        stage = self.strategy.stage
        peer: dict[str, Any] = {"group": self.strategy.pair, "group_peer": 1 - stage}
        sent = (getattr(minibatch, name) for name in NEEDED[1 - stage])
        received = {name: torch.empty_like(getattr(minibatch, name)) for name in NEEDED[stage]}
        calls = [dist.P2POp(dist.isend, tensor, **peer) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, **peer) for tensor in received.values()]
        with self.world.waiting("exchange of sequences"):
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return replace(minibatch, **received)

    def _pipeline(self, count: int, shape: torch.Size) -> Schedule1F1B:
        """Return the schedule, forward and backward in turns, of `count` microbatches [L, N]."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # seconds to import

        key = (count, *shape)
        if key not in self._schedules:
            like = self.strategy.local[0].to("meta")
            number = torch.empty(1, dtype=torch.int64, device="meta")
            features = like.new_empty(*shape, self.policy.config.hidden_size, requires_grad=True)
            terms = like.new_empty(len(LossParts._fields), requires_grad=True)
            boundary = ((number,), (features,), (terms,))
            stage = PipelineStage(
                self.half,
                self.strategy.stage,
                STAGES,
                self.world.device,
                input_args=boundary[self.strategy.stage],
                output_args=boundary[self.strategy.stage + 1],
                group=self.strategy.pair,
            )
            self._schedules[key] = Schedule1F1B(stage, count, loss_fn=first_term)
        return self._schedules[key]


def copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive numbers into tensors."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
