"""Define the policy network, by default a cascade of LSTMs (CLSTM).

In the cascade, a feature LSTM feeds an actor LSTM and a critic LSTM. Source: Zou et al., "A novel
deep reinforcement learning based automated stock trading system using cascaded LSTM networks",
https://arxiv.org/abs/2212.02721.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from agents.learner.network.cores import CORES, NoCore, State, TanhCore
from agents.learner.network.inputs import Encoder
from agents.learner.network.own_modules import make_own
from agents.learner.network.sequences import (
    NetworkResult,
    Pieces,
    Plan,
    overhead_steps,
    plan_pieces,
    run_sequence,
)
from agents.learner.settings import PolicyConfig
from envs.vector.layout import Layout
from rl_dist.strategies.precision import cast_copy, changed_copy

FORBIDDEN = -1e9  # logit of a forbidden action: its probability is exactly 0


class Evaluation(NamedTuple):
    """Results of evaluating stored steps with the current policy."""

    logprobs: Tensor  # [L, N]
    entropy: Tensor  # [L, N]
    values: Tensor  # [L, N]


class Heads(NamedTuple):
    """Outputs of the network's two heads."""

    actor_outputs: Tensor  # [L, N, A] logits of discrete choices, or means of continuous actions
    values: Tensor  # [L, N]


class PolicyStep(NamedTuple):
    """Results of one step of B environments."""

    actions: Tensor  # [B, A] continuous, not clipped; int64 [B] or [B, D] if discrete
    actor_outputs: Tensor  # [B, A] logits or means
    values: Tensor  # [B]
    state: Tensor  # [B, S, H] after the step


class Policy(nn.Module):
    """Actor and critic with recurrent cores; the caller stores the recurrent state.

        row -> encoder -> feature core -> tanh layer -> actor core -> actions
                                                     -> critic core -> value

    A cascade has all three cores. A shared trunk has only the feature core; separate trunks have
    only the actor core and the critic core. Methods take the recurrent state as one tensor
    [B, S, H], which holds S vectors per environment, and return the new state; S is 0 for an mlp.

    With `feature_window` n, the input is the last n observations of the episode, oldest first,
    flattened to n * F numbers, with zeros for steps before the start of the episode (see
    `agents.learner.rollout.policy_input`). If `low_precision` is set, the encoder, the cores and
    the tanh layer compute in that type, with copies of the weights from `cast`. Parameters, output
    layers, and what passes from one part to the next, keep their own type; so do a user's encoder
    and core.
    """

    feature_encoder: Any
    feature_core: Any
    actor_core: Any
    critic_core: Any
    feature_mlp: Any
    low_precision: torch.dtype | None = None
    # Axis of the sequences in each input of `forward`. In the outputs, this axis is 1.
    BATCH_AXES = (1, 1, 0, 1)

    def __init__(self, config: PolicyConfig, layout: Layout, action_space: spaces.Space) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.num_obs = layout.size
        self.mask_columns = layout.columns("mask")  # consecutive columns; empty without a mask

        # the actor returns logits of all discrete choices, or means of continuous actions
        self.num_actions = spaces.utils.flatdim(action_space)
        self.discrete = not isinstance(action_space, spaces.Box)
        self.action_sizes: tuple[int, ...] = ()  # for MultiDiscrete: number of choices per action
        if isinstance(action_space, spaces.MultiDiscrete):
            self.action_sizes = tuple(action_space.nvec.tolist())
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((self.num_actions,), config.log_std_init))

        # names of the modules that a user wrote
        self.own_parts = ["feature_encoder"] if config.encoder else []
        self.own_parts += ["feature_core", "actor_core", "critic_core"] if config.core else []

        # the encoder, then the cores, then the output layers
        size = config.hidden_size
        self.feature_encoder = (
            make_own("encoder", config.encoder, layout, size)
            if config.encoder
            else Encoder(layout, size)
        )
        cascade = config.policy in ("clstm", "mlp")
        num_inputs = self.feature_encoder.num_outputs
        self.feature_core = self.feature_mlp = self.actor_core = self.critic_core = NoCore()
        if cascade or not config.separate_trunks:
            self.feature_core = self._new_core(num_inputs)
            self.feature_mlp = TanhCore(size, size, 1)
            num_inputs = size
        if cascade or config.separate_trunks:
            self.actor_core = self._new_core(num_inputs)
            self.critic_core = self._new_core(num_inputs)
        self.cores = (self.feature_core, self.actor_core, self.critic_core)
        self.actor_head = nn.Linear(size, self.num_actions)
        self.critic_head = nn.Linear(size, 1)
        self._initialise()

    def _new_core(self, num_inputs: int) -> nn.Module:
        config = self.config
        new = partial(make_own, "core", config.core) if config.core else CORES[config.policy]
        return new(num_inputs, config.hidden_size, config.num_layers)

    def _initialise(self) -> None:
        """Set orthogonal weights, zero biases, and gate biases that make cores remember.

        The weights of a user's encoder and core are not changed.
        """
        for name, module in self.named_children():
            if name in self.own_parts:
                continue
            feeds_activation = name in ("feature_encoder", "feature_mlp")
            for parameter in module.parameters():
                if parameter.ndim >= 2:
                    nn.init.orthogonal_(parameter, math.sqrt(2.0) if feeds_activation else 1.0)
                else:
                    nn.init.zeros_(parameter)
        for core in self.cores:
            if hasattr(core, "open_gates"):
                core.open_gates()
        nn.init.orthogonal_(self.actor_head.weight, 0.01)

    def shapes(self) -> dict:
        """Return the input and output shapes that checkpoints store; see `spaces_of`."""
        return {
            "num_obs": self.num_obs,
            "num_actions": self.num_actions,
            "discrete": self.discrete,
            "action_sizes": list(self.action_sizes),
            "layout": self.layout.to_json(),
        }

    def cast(self) -> "Policy":
        """Return a policy that computes in low precision, with weights that are cast here, once.

        Gradients flow to the parameters of this policy.
        """
        if self.low_precision is None:
            return self
        kept = *self.own_parts, "actor_head", "critic_head"
        parts = {
            name: cast_copy(part, self.low_precision)
            for name, part in self.named_children()
            if name not in kept
        }
        return changed_copy(self, {**parts, "low_precision": None})

    @property
    def num_decision_states(self) -> int:
        """Number of state vectors of actor and critic, which precede those of the feature core."""
        return int(self.actor_core.num_states + self.critic_core.num_states)

    def plan(self, pieces: Pieces, sequences: np.ndarray) -> Plan | None:
        """Return a plan of core calls for some sequences [N]; None if stateless.

        Args:
            pieces: the pieces of all sequences of the rollout.
        """
        if self.config.stateless:
            return None
        device = self.critic_head.weight.device
        cores = [core for core in self.cores if core.num_states]
        overhead = overhead_steps(cores, self.config.num_layers, device)
        if self.config.feature_window:  # a step takes so long that the overhead does not matter
            overhead = 0.0
        return plan_pieces(pieces.of(sequences), device, overhead, self.resets_inside)

    @property
    def resets_inside(self) -> bool:
        """Return True if all cores accept resets and run on a CPU; a GPU does not use resets."""
        on_cpu = self.critic_head.weight.device.type == "cpu"
        return on_cpu and all(getattr(core, "accepts_resets", False) for core in self.cores)

    def initial_state(self, num_envs: int) -> Tensor:
        """Return a zero state [num_envs, S, H]; the feature core's vectors come last."""
        features = 0 if self.config.feature_window else self.feature_core.num_states
        num_states = self.num_decision_states + features
        return self.critic_head.weight.new_zeros(num_envs, num_states, self.config.hidden_size)

    def empty_history(self, num_envs: int) -> Tensor:
        """Return zeros [num_envs, n-1, F], the history at the start of an episode."""
        window = max(self.config.feature_window - 1, 0)
        return self.critic_head.weight.new_zeros(num_envs, window, self.num_obs)

    def encode(self, obs: Tensor) -> Tensor:
        """Encode obs [L, N, F] as inputs of the cores [L, N, E]; each row of a window alone."""
        window = max(self.config.feature_window, 1)
        dtype = self.critic_head.weight.dtype
        if self.config.encoder:  # a user's encoder need not know that pixels are bytes
            obs = obs.to(dtype)
        if window == 1:
            return self.feature_encoder(obs).to(dtype)
        return self.feature_encoder(obs.unflatten(-1, (window, -1))).flatten(-2).to(dtype)

    def network(self, inputs: Tensor, state: Tensor, *resets: Tensor) -> NetworkResult:
        """Run L steps of N sequences.

        Takes encoded inputs [L, N, E], the state [N, S, H] before the first step, and optionally
        resets [L, N, 1]. Without resets, each sequence must belong to a single episode. The outputs
        of the result are `Heads` without masks.
        """
        before = state.permute(1, 0, 2).contiguous()  # [S, N, H]
        split = self.num_decision_states
        features, feature_state = self.features(inputs, before[split:], *resets)
        heads, states = self.decisions(features, before[:split], *resets)
        vectors = [vector for core_state in (*states, feature_state) for vector in core_state]
        after = torch.stack(vectors).permute(1, 0, 2).to(state.dtype) if vectors else state
        return NetworkResult(heads, after)

    def masked(self, logits: Tensor, obs: Tensor) -> Tensor:
        """Give forbidden choices probability 0 and no gradient; obs contains the mask."""
        if not self.mask_columns:
            return logits
        newest = obs[..., -self.num_obs :]  # a window also contains the masks of earlier steps
        first = self.mask_columns[0]
        mask = newest[..., first : first + self.num_actions]
        return torch.where(mask > 0.5, logits, FORBIDDEN)

    def features(self, inputs: Tensor, state: Tensor, *resets: Tensor) -> tuple[Tensor, State]:
        """Run the first half of the cascade after the encoder: feature core and tanh layer.

        Takes encoded inputs [L, N, E], or [L, N, n * E] with a window, and the feature core's state
        [S, N, H] before the first step. Returns features [L, N, H] in the type of the parameters,
        and the state after the last step.
        """
        window = self.config.feature_window
        if window:  # run every window as n steps that start from a zero state
            rows = inputs.flatten(0, 1).unflatten(1, (window, -1)).transpose(0, 1)
            zeros = state.new_zeros(
                self.feature_core.num_states, rows.shape[1], self.config.hidden_size
            )
            hidden, _ = self.feature_core(rows, zeros)
            outputs = hidden[-1].unflatten(0, inputs.shape[:2])
            after = state
        else:
            outputs, after = self.feature_core(inputs, state, *resets)
        return self.feature_mlp(outputs, state)[0].to(state.dtype), after

    def decisions(
        self, features: Tensor, state: Tensor, *resets: Tensor
    ) -> tuple[Heads, tuple[State, State]]:
        """Run the second half of the cascade: actor, critic and their output layers.

        Takes features [L, N, H] and the state [S, N, H] of actor and critic before the first step.
        Returns the outputs, and the states of actor and critic after the last step.
        """
        split = self.actor_core.num_states
        actor, actor_state = self.actor_core(features, state[:split], *resets)
        critic, critic_state = self.critic_core(features, state[split:], *resets)
        dtype = self.critic_head.weight.dtype
        values = self.critic_head(critic.to(dtype)).squeeze(-1)
        return Heads(self.actor_head(actor.to(dtype)), values), (actor_state, critic_state)

    def choices(self, logits: Tensor) -> Tensor:
        """Return the log probabilities [..., D, K] of the K choices of each of D actions."""
        sizes = self.action_sizes or (self.num_actions,)
        return split_choices(logits, sizes).log_softmax(-1)

    @torch.no_grad()
    def logprobs(self, actor_outputs: Tensor, actions: Tensor) -> Tensor:
        """Return log probabilities [...] of actions, given the actor's outputs [..., A]."""
        return self.evaluate(Heads(actor_outputs, actor_outputs), actions).logprobs

    @torch.no_grad()
    def scale_noise(self, noise: Tensor) -> Tensor:
        """Scale noise [..., A] so that `act` can add it to the actor's outputs."""
        return noise if self.discrete else self.log_std.exp() * noise

    @torch.no_grad()
    def act(
        self, obs: Tensor, state: Tensor, episode_start: Tensor, scaled_noise: Tensor | None = None
    ) -> PolicyStep:
        """Choose actions for one step of B environments.

        Args:
            obs: normalised observations [B, F].
            state: recurrent state [B, S, H].
            episode_start: [B] bool; True resets the state of an environment before the step.
            scaled_noise: [B, A] from `scale_noise`; None: take the most likely action.
        """
        if not self.config.memory:
            episode_start = torch.ones_like(episode_start)
        # `network` works on [S, B, H]. Its last result has this layout in memory, so resetting the
        # transposed state gives a contiguous tensor, and `network` need not copy it again.
        state = state.transpose(0, 1).masked_fill(episode_start[:, None], 0.0).transpose(0, 1)
        policy = self.cast()
        result = policy.network(policy.encode(obs[None]), state)
        actor_outputs, values = (output[0] for output in result.outputs)
        actor_outputs = self.masked(actor_outputs, obs)
        actions = actor_outputs if scaled_noise is None else actor_outputs + scaled_noise
        if self.discrete:
            if self.action_sizes:
                actions = split_choices(actions, self.action_sizes)
            actions = actions.argmax(-1)
        return PolicyStep(actions, actor_outputs, values, result.state)

    def forward(
        self,
        obs: Tensor,
        actions: Tensor,
        state: Tensor,
        episode_start: Tensor,
        plan: Plan | None = None,
    ) -> Evaluation:
        """Evaluate stored steps with the current policy.

        Gradient steps must call this method, because DistributedDataParallel prepares its gradient
        reduction in `forward`. Takes obs [L, N, F], actions [L, N, A] or [L, N], the state
        [N, S, H] before the first step, episode_start [L, N] bool, and optionally the result of
        `plan` for these starts.
        """
        policy = self.cast()
        inputs = policy.encode(obs)
        if self.config.stateless:  # run every step as a sequence
            steps = inputs.flatten(0, 1)[None]
            outputs = policy.network(steps, self.initial_state(steps.shape[1])).outputs
            heads = Heads(*(output[0].unflatten(0, obs.shape[:2]) for output in outputs))
        else:
            heads = Heads(*run_sequence(policy.network, inputs, state, episode_start, plan))
        masked = self.masked(heads.actor_outputs, obs)
        return self.evaluate(heads._replace(actor_outputs=masked), actions)

    def evaluate(self, heads: Heads, actions: Tensor) -> Evaluation:
        """Evaluate actions with the distribution that the actor's outputs define."""
        outputs = heads.actor_outputs
        if self.discrete:
            choices = self.choices(outputs)
            chosen = choices.gather(-1, actions.reshape(*choices.shape[:-1], 1))
            return Evaluation(chosen.sum((-2, -1)), entropy_of(choices), heads.values)
        # independent normal distributions, with constants that are added once for all steps
        deviations = (actions - outputs) * (-self.log_std).exp()
        constant = (self.log_std + 0.5 * math.log(2.0 * math.pi)).sum()
        logprobs = -0.5 * deviations.square().sum(-1) - constant
        entropy = constant + 0.5 * self.num_actions
        return Evaluation(logprobs, entropy.expand_as(logprobs), heads.values)

    def largest_entropy(self, obs: Tensor) -> Tensor:
        """Return the entropy [...] of a uniform choice among the actions allowed at obs."""
        # without masks, the entropy is the same for all obs
        logits = self.masked(self.critic_head.weight.new_zeros(self.num_actions), obs)
        return entropy_of(self.choices(logits)).expand(obs.shape[:-1])


def entropy_of(choices: Tensor) -> Tensor:
    """Return the entropy [...] of actions whose choices have log probabilities [..., D, K]."""
    return -(choices.exp() * choices).sum((-2, -1))


def split_choices(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split logits [..., A] into one row per action, [..., D, K]; K is the largest of `sizes`.

    Shorter rows are padded with FORBIDDEN.
    """
    if len(sizes) == 1:
        return logits.unsqueeze(-2)
    rows = logits.split(sizes, -1)
    padded = [
        nn.functional.pad(row, (0, max(sizes) - row.shape[-1]), value=FORBIDDEN) for row in rows
    ]
    return torch.stack(padded, -2)
