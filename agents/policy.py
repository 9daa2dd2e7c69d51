"""The policy: a cascade of LSTMs (CLSTM), and its memoryless twin.

Source: Zou et al., "A novel deep reinforcement learning based automated stock trading system using
cascaded LSTM networks", https://arxiv.org/abs/2212.02721: a feature LSTM feeds an actor and a critic LSTM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from agents.lstm import run_sequence
from rl_dist.config import flag
from rl_dist.errors import UserError
from rl_dist.parallel.precision import autocast


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Shape of the policy network."""

    policy: str = flag("clstm", "clstm: cascaded LSTM; mlp: its memoryless twin", choices=("clstm", "mlp"))
    hidden_size: int = flag(128, "width of every LSTM and layer", "units")
    feature_window: int = flag(
        0, "0: the feature LSTM keeps its state; n: it reads the last n observations anew, as in the paper", "steps"
    )
    memory: bool = flag(True, "off: the state is zeroed before every step, the ablation of --policy clstm")
    log_std_init: float = flag(-0.5, "initial log standard deviation of Box actions", "nats")

    def __post_init__(self) -> None:
        if self.policy not in ("clstm", "mlp"):
            raise ValueError(f"policy must be clstm or mlp, got {self.policy!r}")
        if not 1 <= self.hidden_size <= 8192:
            raise ValueError(f"hidden_size must be 1..8192, got {self.hidden_size}")
        if not 0 <= self.feature_window <= 1024:
            raise ValueError(f"feature_window must be 0..1024, got {self.feature_window}: 0 turns it off")
        if self.feature_window and self.policy == "mlp":
            raise ValueError("feature_window works with policy clstm only: drop it or use --policy clstm")
        if not self.memory and (self.feature_window or self.policy == "mlp"):
            raise ValueError("no-memory works with policy clstm without feature_window only: drop one of them")
        if not -5.0 <= self.log_std_init <= 2.0:
            raise ValueError(f"log_std_init must be -5..2, got {self.log_std_init}")


    @property
    def stateless(self) -> bool:
        """Whether a step depends on nothing before it."""
        return self.policy == "mlp" or not self.memory


class Evaluation(NamedTuple):
    """What the loss needs to know of re-evaluated steps."""

    logprobs: Tensor  # [L, N]
    entropy: Tensor  # [L, N]
    values: Tensor  # [L, N]


def distribution_of(actor: Tensor, log_std: Tensor | None) -> Distribution:
    """Action distribution of actor outputs [..., A].

    Args:
        log_std: [A] of Box actions; None: they are discrete.
    """
    if log_std is None:
        return Categorical(logits=actor, validate_args=False)
    return Independent(Normal(actor, log_std.exp(), validate_args=False), 1, validate_args=False)


def evaluation_of(actor: Tensor, values: Tensor, actions: Tensor, log_std: Tensor | None) -> Evaluation:
    """Log probabilities and entropies of actions under the network's outputs."""
    distribution = distribution_of(actor, log_std)
    return Evaluation(distribution.log_prob(actions), distribution.entropy(), values)


class Policy(nn.Module):
    """Actor and critic over a recurrent core; never stores recurrent state.

    The state is one tensor [B, S, H] (S = 0 for the memoryless twin): it goes in and comes out. With
    `feature_window` n, an observation passed in is the last n of the episode, oldest first, flattened to
    n * F with zeros before the episode's start (see `agents.rollout.policy_input`).

    With `low_precision` LSTMs and layers compute in that type, acting as well as training; parameters, state, heads
    and distribution keep theirs.
    """

    low_precision: torch.dtype | None = None
    evaluation: Callable[..., Evaluation] = staticmethod(evaluation_of)  # or the same, compiled
    BATCH_AXES = (1, 1, 0, 1)  # of the slots, in the inputs of `forward`; in its outputs it is the first of these

    def __init__(self, config: PolicyConfig, num_obs: int, action_space: spaces.Space) -> None:
        super().__init__()
        self.config, self.num_obs = config, num_obs
        self.discrete = isinstance(action_space, spaces.Discrete)
        if isinstance(action_space, spaces.Discrete):
            self.num_actions = int(action_space.n)
        else:
            assert isinstance(action_space, spaces.Box) and action_space.shape is not None
            self.num_actions = int(np.prod(action_space.shape))
            self.log_std = nn.Parameter(torch.full((self.num_actions,), config.log_std_init))
        size = config.hidden_size
        core: Any = nn.LSTM if config.policy == "clstm" else _TanhLayer
        self.feature_core = core(num_obs, size)
        self.feature_mlp = nn.Sequential(nn.Linear(size, size), nn.Tanh())
        self.actor_core = core(size, size)
        self.critic_core = core(size, size)
        self.actor_head = nn.Linear(size, self.num_actions)
        self.critic_head = nn.Linear(size, 1)
        self._initialise()

    def _initialise(self) -> None:
        """Orthogonal weights, zero biases, forget gates open (Jozefowicz et al. 2015), small actor head."""
        for name, parameter in self.named_parameters():
            if name.endswith("log_std"):
                continue
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter, math.sqrt(2.0) if "mlp" in name else 1.0)
            else:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    size = self.config.hidden_size
                    with torch.no_grad():
                        parameter[size : 2 * size] = 1.0
        nn.init.orthogonal_(self.actor_head.weight, 0.01)

    @property
    def num_states(self) -> int:
        """How many [B, H] vectors the state holds: (h, c) of each stateful LSTM."""
        if self.config.policy == "mlp":
            return 0
        return 4 if self.config.feature_window else 6

    def initial_state(self, num_envs: int) -> Tensor:
        """Zero state [num_envs, S, H]."""
        return self.critic_head.weight.new_zeros(num_envs, self.num_states, self.config.hidden_size)

    def network(self, obs: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Dense pass without resets: obs [L, N, F], state [N, S, H] before them.

        Returns:
            (actor [L, N, A], values [L, N]) and the state [N, S, H] after them.
        """
        if self.config.policy == "mlp":
            with autocast(self.low_precision, obs.device):
                features = self.feature_mlp(self.feature_core(obs))
                actor, critic = self.actor_core(features), self.critic_core(features)
            return self._heads(actor, critic), state
        if self.config.stateless and len(obs) > 1:  # every step is a sequence of its own
            outputs, _ = self.network(obs.flatten(0, 1)[None], self.initial_state(obs.shape[0] * obs.shape[1]))
            return tuple(output[0].unflatten(0, obs.shape[:2]) for output in outputs), state
        if self.config.stateless:
            state = torch.zeros_like(state)
        parts = state.permute(1, 0, 2).contiguous()  # [S, N, H]
        features, feature_parts = self.features(obs, parts[4:])
        outputs, decision_parts = self.decisions(features, parts[:4])
        return outputs, torch.cat([*decision_parts, *feature_parts]).permute(1, 0, 2).to(state.dtype)

    def features(self, obs: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """First half of the cascade, without resets.

        Args:
            obs: [L, N, F], or [L, N, n * F] with a window.
            state: [2, N, H], (h, c) of the feature LSTM before them; [0, N, H] with a window.

        Returns:
            Features [L, N, H] of the parameters' type, and the state after them.
        """
        with autocast(self.low_precision, obs.device):
            if self.config.feature_window:
                return self.feature_mlp(self._windowed_features(obs)).to(state.dtype), ()
            outputs, new_state = _run_lstm(self.feature_core, obs, state)
            return self.feature_mlp(outputs).to(state.dtype), new_state

    def decisions(self, features: Tensor, state: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """Second half of the cascade, without resets.

        Args:
            features: [L, N, H].
            state: [4, N, H], (h, c) of the actor's and of the critic's LSTM before them.

        Returns:
            (actor [L, N, A], values [L, N]) and the state after them.
        """
        with autocast(self.low_precision, features.device):
            actor, actor_state = _run_lstm(self.actor_core, features, state[0:2])
            critic, critic_state = _run_lstm(self.critic_core, features, state[2:4])
        return self._heads(actor, critic), (*actor_state, *critic_state)

    def _heads(self, actor: Tensor, critic: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.critic_head.weight.dtype
        return self.actor_head(actor.to(dtype)), self.critic_head(critic.to(dtype)).squeeze(-1)

    def _windowed_features(self, obs: Tensor) -> Tensor:
        """The paper's form: [L, N, n * F] windows from zero state, last output [L, N, H]."""
        windows = obs.reshape(-1, self.config.feature_window, self.num_obs).transpose(0, 1)
        return self.feature_core(windows)[0][-1].unflatten(0, obs.shape[:2])

    def distribution(self, actor: Tensor) -> Distribution:
        """Action distribution of actor outputs [..., A]."""
        return distribution_of(actor, None if self.discrete else self.log_std)

    @torch.no_grad()
    def act(
        self, obs: Tensor, state: Tensor, episode_start: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step for B environments.

        Args:
            obs: [B, F] normalised. state: [B, S, H]. episode_start: [B] bool, resets the state first.
            noise: [B, A] from `agents.noise`; None takes the most likely action.

        Returns:
            actions ([B, A], unclipped, or [B] int64), logprobs [B], values [B], state [B, S, H].
        """
        (actor, values), new_state = self.network(obs[None], state * ~episode_start[:, None, None])
        actor = actor[0]
        if self.discrete:
            actions = (actor if noise is None else actor + noise).argmax(-1)
        else:
            actions = actor if noise is None else actor + self.log_std.exp() * noise
        return actions, self.distribution(actor).log_prob(actions), values[0], new_state

    def forward(self, obs: Tensor, actions: Tensor, state: Tensor, episode_start: Tensor) -> Evaluation:
        """Re-evaluate stored steps: log probabilities, entropies and values.

        Takes obs [L, N, F], the state [N, S, H] before them and episode_start [L, N].

        The only entry for training: DistributedDataParallel arms its reduction in `forward`.
        """
        if self.config.stateless:
            (actor, values), _ = self.network(obs, state)
        else:
            actor, values = run_sequence(self.network, obs, state, episode_start)
        return self.evaluate(actor, values, actions)

    def evaluate(self, actor: Tensor, values: Tensor, actions: Tensor) -> Evaluation:
        """Log probabilities and entropies of actions under the network's outputs."""
        return self.evaluation(actor, values, actions, None if self.discrete else self.log_std)


def _run_lstm(lstm: nn.LSTM, inputs: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One LSTM over inputs [L, N, F] from state [2, N, H]; single steps without gradient take the faster cell."""
    if len(inputs) == 1 and not torch.is_grad_enabled():
        hidden, cell = torch.lstm_cell(inputs[0], (state[0], state[1]), *lstm.all_weights[0])
        return hidden[None], (hidden[None], cell[None])
    return lstm(inputs, (state[0:1], state[1:2]))


class _TanhLayer(nn.Sequential):
    """What stands in an LSTM's place in the memoryless twin."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(nn.Linear(num_inputs, num_outputs), nn.Tanh())


def check_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """Compare a policy's shape with that of weights to be loaded.

    Raises:
        UserError: they have another shape than the policy; one line naming the first that differs.
    """
    own = policy.state_dict()
    for name in sorted(set(own) | set(weights)):
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(weights[name].shape) if name in weights else "absent"
        if here != there:
            raise UserError(
                f"the checkpoint is of another shape: {name} is {there} there and {here} here; "
                "use the environment, --observation, --policy and --hidden_size it was trained with"
            )
