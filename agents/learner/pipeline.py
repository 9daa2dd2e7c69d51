"""PPO with --hybrid_form pipeline: each rank of a pair trains half the cascade.

The first rank of a pair trains the feature LSTM (stage 0), the second rank trains actor and critic
(stage 1). Together they process the sequences of both ranks, divided into parts. The first rank
sends the features of one part; while waiting for their gradient, it computes the features of the
next part. The gradients of each stage are averaged over all pairs. In rollouts, every rank runs the
whole policy, so the two ranks of a pair exchange the parameters of their stages after every update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.convert_parameters import parameters_to_vector

from agents.learner.network.sequences import NetworkResult, Pieces, run_sequence
from agents.learner.policy import Heads, Policy
from agents.learner.ppo import PPO, LossParts, Minibatch, Plans, ppo_loss
from rl_dist.errors import UserError
from rl_dist.process_group.world import World, make_mesh
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

STAGES = 2
FEATURES, DECISIONS = range(STAGES)
# Minibatch fields that each stage needs. The second stage computes the loss.
NEEDED = (
    ("obs", "episode_start", "lstm_state"),
    ("actions", "logprobs", "values", "advantages", "returns", "episode_start", "lstm_state"),
)


class StageStrategy(Strategy):
    """Updates and saves both stages, with gradients that `PipelinePPO` computes."""

    def __init__(self, config: StrategyConfig, world: World) -> None:
        if world.backend == "gloo" and world.device.type == "cuda":
            raise UserError(  # gloo's send and receive read no memory of a GPU
                "hybrid_form pipeline cannot use backend gloo on GPUs: use --backend nccl"
            )
        super().__init__(config, world)
        self.num_pairs = world.size // STAGES
        with world.waiting("start of the pipeline"):
            self.mesh = make_mesh(world, (self.num_pairs, STAGES))
        self.stage: int = self.mesh.get_local_rank(1)
        self.pair = self.mesh.get_group(1)
        self.replicas = self.mesh.get_group(0)
        self.stages: tuple[list[nn.Parameter], ...] = ([], [])  # parameters by stage
        self.local = self.stages[self.stage]  # parameters of this rank's stage
        self.grad_norm = torch.zeros(())  # gradient norm over both stages

    def wrap(self, module: Policy) -> Policy:  # type: ignore[override]
        """Copy the weights of rank 0 to all ranks; return the same policy object."""
        if module.mask_columns:
            raise UserError(
                "hybrid_form pipeline does not support action masks: use --strategy ddp"
            )
        for name, parameter in module.named_parameters():
            stage = FEATURES if name.startswith("feature_") else DECISIONS
            self.stages[stage].append(parameter)
        self._keep(module, self.local)
        self.parameters = list(module.parameters())
        with self.world.waiting("start of the pipeline"):
            for parameter in self.parameters:
                dist.broadcast(parameter.detach(), src=0)
        return module

    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip this stage's gradient by the norm over both stages; take the step.

        If the norm is not finite, no rank takes the step.
        """
        # Free the optimizer state of the other stage, which a save or a resume leaves on this rank.
        for parameter in self.stages[1 - self.stage]:
            optimizer.state.pop(parameter, None)
        grad_norm = self.agreed_norm(self.grad_norm)
        stepped = torch.isfinite(grad_norm)  # the value is the same on all ranks
        if stepped:
            clip_grads_with_norm_(self.local, max_grad_norm, grad_norm.to(self.local[0].dtype))
            optimizer.step()
        return grad_norm, stepped

    @torch.no_grad()
    def share_parameters(self) -> None:
        """Exchange the trained parameters between the two ranks of each pair."""
        with self.world.waiting("exchange of parameters"):
            for stage, parameters in enumerate(self.stages):
                flat = parameters_to_vector(parameters)
                dist.broadcast(flat, group=self.pair, group_src=stage)
                if stage != self.stage:
                    copy_from(flat, parameters)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict:
        """Return the optimizer state of both stages. Every rank must call this."""
        with self.world.waiting("exchange of optimizer state"):
            # before the first step, the optimizer has no state
            for name, example in optimizer.state.get(self.local[0], {}).items():
                for stage, parameters in enumerate(self.stages):
                    for parameter in parameters:
                        state = optimizer.state[parameter]
                        if name not in state:
                            state[name] = torch.empty_like(parameter if example.ndim else example)
                        # Adam's step counter may be on the CPU
                        moved = state[name].to(self.world.device)
                        dist.broadcast(moved, group=self.pair, group_src=stage)
                        state[name].copy_(moved)
        return optimizer.state_dict()

    def swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Exchange tensors with the other rank of the pair."""
        call = partial(dist.P2POp, group=self.pair, group_peer=1 - self.stage)
        calls = [call(dist.isend, tensor.detach()) for tensor in sent]
        calls += [call(dist.irecv, tensor) for tensor in received]
        for work in dist.batch_isend_irecv(calls):
            work.wait()


class PipelinePPO(PPO):
    """PPO whose forward and backward passes are split over the two ranks of a pair."""

    strategy: StageStrategy

    def plans(self, pieces: Pieces, sequences: np.ndarray) -> Plans:
        """Return no plans: `run_sequence` makes them, also for the partner's sequences."""
        return []

    def gradients(self, minibatch: Minibatch, plans: Plans) -> LossParts:
        """Compute this stage's gradient of the loss, averaged over all ranks.

        Every rank has the same number of sequences and the same number of parts. If a loss is not
        finite, the gradient becomes NaN, so that all ranks skip the step.
        """
        strategy = self.strategy
        stage = strategy.stage
        received = self._exchange(minibatch)
        # both stages process the minibatch of the first rank first
        pair = (minibatch, received) if stage == FEATURES else (received, minibatch)
        parts = [part for half in pair for part in half.into_microbatches(self.num_microbatches)]
        with self.world.reduction_context("pipeline"):
            run_stage = self._train_features if stage == FEATURES else self._train_decisions
            terms = run_stage(parts)

            # average the gradients of this stage over all parts and pairs
            self.world.gradients_ready()
            gradients = [p.grad for p in strategy.local if p.grad is not None]
            flat = parameters_to_vector(gradients) / len(parts)
            dist.all_reduce(flat, group=strategy.replicas)
            copy_from(flat / strategy.num_pairs, gradients)

            # Add up the squared gradient norms of both stages. The second stage sends its loss
            # terms, to which the first stage adds zeros.
            square = get_total_norm(gradients).double().square()
            shared = torch.cat([square[None], terms.double().flatten()])
            dist.all_reduce(shared, group=strategy.pair)
        strategy.grad_norm = shared[0].sqrt()
        self.clock.mark("backward")
        terms = shared[1:].unflatten(0, (STAGES, self.num_microbatches, -1))
        return LossParts(*terms[stage].mean(0))  # losses of this rank's minibatch

    def _exchange(self, minibatch: Minibatch) -> Minibatch:
        """Exchange minibatches with the partner; return the fields that this stage needs.

        The result also has the other fields of this rank's minibatch, but they are not used.
        """
        stage = self.strategy.stage
        received = {name: torch.empty_like(getattr(minibatch, name)) for name in NEEDED[stage]}
        with self.world.waiting("exchange of sequences"):
            sent = [getattr(minibatch, name) for name in NEEDED[1 - stage]]
            self.strategy.swap(sent, list(received.values()))
        return replace(minibatch, **received)

    def _train_features(self, parts: Sequence[Minibatch]) -> Tensor:
        """Compute the feature LSTM's gradient, summed over parts; return zeros as losses.

        Each pass of the loop sends one part's features and receives the previous part's gradient.
        """
        policy = self.policy.cast()
        waiting: list[Tensor] = []  # features of the previous part, still without gradient
        for number in range(len(parts) + 1):
            new = [self._features(policy, part) for part in parts[number : number + 1]]
            gradients = [torch.empty_like(features) for features in waiting]
            self.strategy.swap(new, gradients)
            torch.autograd.backward(waiting, gradients)
            waiting = new
        return gradients[0].new_zeros(len(parts), len(LossParts._fields))

    def _train_decisions(self, parts: Sequence[Minibatch]) -> Tensor:
        """Compute actor and critic gradients, summed over parts; return the loss terms.

        Each pass of the loop receives one part's features and sends the previous part's gradient.
        """
        terms: list[Tensor] = []
        gradients: list[Any] = []  # gradient for the features of the previous part
        policy = self.policy.cast()
        size = policy.config.hidden_size
        for part in parts:
            features = part.lstm_state.new_empty(*part.episode_start.shape, size)
            self.strategy.swap(gradients, [features])
            features.requires_grad_()
            state = part.lstm_state[:, : policy.num_decision_states]
            outputs = self._run(policy.decisions, features, state, part.episode_start)
            evaluation = policy.evaluate(Heads(*outputs), part.actions)
            losses = ppo_loss(evaluation, part, self.config)
            factor = losses.total.detach() * 0.0 + 1.0  # 1, or NaN if the loss is not finite
            (losses.total * factor).backward()
            gradients = [features.grad]
            terms.append(torch.stack(losses).detach())
        self.strategy.swap(gradients, [])
        return torch.stack(terms)

    def _features(self, policy: Policy, part: Minibatch) -> Tensor:
        """Return the features [L, N, H] of a part."""

        def half(*inputs: Tensor) -> Any:
            features, after = policy.features(*inputs)
            return (features,), after

        state = part.lstm_state[:, policy.num_decision_states :]
        inputs = policy.encode(part.obs)
        (features,) = self._run(half, inputs, state, part.episode_start)
        return features

    def _run(
        self, half: Callable[..., Any], inputs: Tensor, state: Tensor, episode_start: Tensor
    ) -> tuple[Tensor, ...]:
        """Run half of the policy over inputs [L, N, ...], with resets at episode starts.

        Args:
            half: Policy.decisions, or Policy.features with its output in a tuple.
        """
        self.world.heartbeat()
        if not self.policy.config.memory:  # zero the state before every step
            episode_start = torch.ones_like(episode_start)
        return run_sequence(
            lambda block, before: NetworkResult(*half(block, before.transpose(0, 1).contiguous())),
            inputs,
            state,
            episode_start,
        )


def copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive sections of a flat tensor into the given tensors."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
