"""PPO on pairs of ranks: strategy hybrid with the cascade in two stages.

The first rank of a pair trains the feature LSTM, the second one trains actor and critic. A pair
works on the sequences of both its ranks, cut into parts. The first rank sends the features of a
part and gets their gradient back; meanwhile it computes the features of the next part. Gradients
of a stage are averaged over the pairs. In rollouts, every rank acts with the whole policy, so
after an update the two ranks of a pair exchange the parameters of their stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from agents.ppo import PPO, LossParts, ppo_loss
from rl_dist.errors import UserError
from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.mesh import make_mesh
from rl_dist.strategies.strategy import Strategy

if TYPE_CHECKING:
    from agents.policy import Policy

STAGES = 2
FEATURES, DECISIONS = range(STAGES)
# fields of a minibatch that each stage needs; the second one computes the loss
NEEDED = (
    ("obs", "episode_start", "lstm_state"),
    ("actions", "logprobs", "values", "advantages", "returns", "episode_start", "lstm_state"),
)


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
        self.local: list[nn.Parameter] = []  # parameters of this rank's stage
        self.grad_norm = torch.zeros(())  # over both stages

    def wrap(self, module: Policy) -> Policy:  # type: ignore[override]
        """Return the policy itself, with the weights of rank 0."""
        if module.config.policy != "clstm" or module.mask_columns:
            raise UserError(
                "hybrid_form pipeline cuts a cascade of LSTMs without masks of actions in two: "
                "use --policy clstm, or --strategy ddp"
            )
        features = [p for name, p in module.named_parameters() if name.startswith("feature_")]
        others = [p for name, p in module.named_parameters() if not name.startswith("feature_")]
        self.stages = (features, others)
        self.local = self.stages[self.stage]
        self._keep(module, self.local)
        self.parameters = list(module.parameters())
        with self.world.waiting("start of the pipeline"):
            for parameter in self.parameters:
                dist.broadcast(parameter.detach(), src=0)
        return module

    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip by the norm over both stages and step this one, on all ranks or on none."""
        for parameter in self.stages[1 - self.stage]:
            optimizer.state.pop(parameter, None)  # frees what a save or a resume has filled in
        grad_norm = self.agreed_norm(self.grad_norm)
        stepped = torch.isfinite(grad_norm)  # the same on all ranks
        if stepped:
            clip_grads_with_norm_(self.local, max_grad_norm, grad_norm.to(self.local[0].dtype))
            optimizer.step()
        return grad_norm, stepped

    @torch.no_grad()
    def share_parameters(self) -> None:
        """Give each rank of a pair the parameters that the other one has trained."""
        with self.world.waiting("exchange of parameters"):
            for stage, parameters in enumerate(self.stages):
                flat = parameters_to_vector(parameters)
                dist.broadcast(flat, group=self.pair, group_src=stage)
                if stage != self.stage:
                    copy_from(flat, parameters)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole `state_dict`, of both stages; all ranks call."""
        with self.world.waiting("exchange of optimizer state"):
            # there are no entries before the first step
            for name, example in optimizer.state.get(self.local[0], {}).items():
                for stage, parameters in enumerate(self.stages):
                    for parameter in parameters:
                        state = optimizer.state[parameter]
                        if name not in state:
                            state[name] = torch.empty_like(parameter if example.ndim else example)
                        moved = state[name].to(self.world.device)  # Adam may count on the CPU
                        dist.broadcast(moved, group=self.pair, group_src=stage)
                        state[name].copy_(moved)
        return optimizer.state_dict()

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send tensors to the other rank of the pair and receive its tensors."""
        peer: dict[str, Any] = {"group": self.pair, "group_peer": 1 - self.stage}
        calls = [dist.P2POp(dist.isend, tensor.detach(), **peer) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, **peer) for tensor in received]
        for work in dist.batch_isend_irecv(calls):
            work.wait()


class PipelinePPO(PPO):
    """PPO that runs forward and backward through two stages, on the ranks of a pair."""

    strategy: StageStrategy

    def gradients(self, minibatch: Minibatch, plans: Sequence[Plan]) -> LossParts:
        """Compute this stage's gradient of the mean loss of all ranks.

        All ranks have equally many sequences, and cut them into equally many parts. A loss that is
        not finite makes the gradient NaN, so that all ranks skip the step.
        """
        strategy, stage = self.strategy, self.strategy.stage
        theirs = self._partners(minibatch)
        pair = (minibatch, theirs) if stage == FEATURES else (theirs, minibatch)
        parts = [part for half in pair for part in half.into_microbatches(self.num_microbatches)]
        with self.world.reduction_context("pipeline"):
            run_stage = self._train_features if stage == FEATURES else self._train_decisions
            terms = run_stage(parts)

            # average this stage's gradients over all parts and pairs
            self.world.gradients_ready()
            gradients = [p.grad for p in strategy.local if p.grad is not None]
            flat = parameters_to_vector(gradients) / len(parts)
            dist.all_reduce(flat, group=strategy.replicas)
            copy_from(flat / strategy.num_pairs, gradients)

            # share the norm over both stages, and the terms of the loss
            square = get_total_norm(gradients).double().square()
            shared = torch.cat([square[None], terms.double().flatten()])
            dist.all_reduce(shared, group=strategy.pair)
        strategy.grad_norm = shared[0].sqrt()
        self.clock.mark("backward")
        terms = shared[1:].unflatten(0, (STAGES, self.num_microbatches, -1))
        return LossParts(*terms[stage].mean(0))

    def _partners(self, minibatch: Minibatch) -> Minibatch:
        """Receive the fields of the partner's minibatch that this stage needs.

        The other fields of the result belong to this rank's minibatch and are not used.
        """
        stage = self.strategy.stage
        received = {name: torch.empty_like(getattr(minibatch, name)) for name in NEEDED[stage]}
        with self.world.waiting("exchange of sequences"):
            sent = [getattr(minibatch, name) for name in NEEDED[1 - stage]]
            self.strategy.swap(sent, list(received.values()))
        return replace(minibatch, **received)

    def _train_features(self, parts: Sequence[Minibatch]) -> Tensor:
        """Add the feature LSTM's gradient of all parts; return zeros for their loss terms.

        In every turn, the features of a part go out and the gradient of the part before comes back.
        """
        waiting: list[Tensor] = []  # the features of the part before
        for number in range(len(parts) + 1):
            new = [self._features(part) for part in parts[number : number + 1]]
            gradients = [torch.empty_like(features) for features in waiting]
            self.strategy.swap(new, gradients)
            torch.autograd.backward(waiting, gradients)
            waiting = new
        return gradients[0].new_zeros(len(parts), len(LossParts._fields))

    def _train_decisions(self, parts: Sequence[Minibatch]) -> Tensor:
        """Add the gradients of actor and critic of all parts; return their loss terms.

        In every turn, the features of a part come in and the gradient of the part before goes out.
        """
        terms: list[Tensor] = []
        gradients: list[Any] = []  # gradient of the features of the part before
        size = self.policy.config.hidden_size
        for part in parts:
            features = part.lstm_state.new_empty(*part.episode_start.shape, size)
            self.strategy.swap(gradients, [features])
            losses = self._losses(features.requires_grad_(), part)
            one = losses.total.detach() * 0.0 + 1.0  # NaN if the loss is not finite
            (losses.total * one).backward()
            gradients = [features.grad]
            terms.append(torch.stack(losses).detach())
        self.strategy.swap(gradients, [])
        return torch.stack(terms)

    def _features(self, part: Minibatch) -> Tensor:
        """Return the features [L, N, H] of a part."""
        state = part.lstm_state[:, self.policy.num_decision_states :]
        return self._run(self.policy.features, part.obs, state, part.episode_start)[0]

    def _losses(self, features: Tensor, part: Minibatch) -> LossParts:
        """Return the losses of a part, for its features [L, N, H]."""
        state = part.lstm_state[:, : self.policy.num_decision_states]
        actor, values = self._run(self.policy.decisions, features, state, part.episode_start)
        return ppo_loss(self.policy.evaluate(actor, values, part.actions), part, self.config)

    def _run(
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


def copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the numbers of a flat tensor into tensors, one after the other."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
