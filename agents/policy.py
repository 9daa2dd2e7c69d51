"""The policy: a cascade of LSTMs (CLSTM), and its memoryless twin.

A feature LSTM feeds an actor and a critic LSTM. Source: Zou et al., "A novel deep reinforcement
learning based automated stock trading system using cascaded LSTM networks",
https://arxiv.org/abs/2212.02721.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from agents.lstm import run_sequence
from rl_dist.config import configuration, setting
from rl_dist.errors import UserError
from rl_dist.parallel.config import autocast


@configuration
class PolicyConfig:
    """Shape of the policy network."""

    policy: Literal["clstm", "mlp"] = setting("clstm")
    """clstm: a cascade of LSTMs; mlp: the same without memory."""
    hidden_size: int = setting(128, "units", within=(1, 8192), main=True)
    """Width of every LSTM and every layer."""
    feature_window: int = setting(0, "steps", within=(0, 1024), presets={"--preset paper": 30})
    """0: the feature LSTM keeps its state between steps; n: it reads the last n observations at
    every step, as in the paper."""
    memory: bool = setting(True)
    """off: the state is zeroed before every step, to measure what memory is worth."""
    log_std_init: float = setting(-0.5, "nats", within=(-5, 2))
    """Initial log standard deviation of continuous actions."""
    noise_color: float = setting(0.0, within=(0, 2))
    """Of the noise of continuous actions over time: 0 white, 1 pink; 0.5 to 1 reach sparse rewards
    that white noise does not."""

    def __post_init__(self) -> None:
        if self.feature_window and self.policy == "mlp":
            raise ValueError(
                "feature_window works with policy clstm only: drop it or use --policy clstm"
            )
        if not self.memory and (self.feature_window or self.policy == "mlp"):
            raise ValueError(
                "no-memory works with policy clstm without feature_window only: drop one of them"
            )

    @property
    def stateless(self) -> bool:
        """Whether a step depends on nothing before it."""
        return self.policy == "mlp" or not self.memory


class Evaluation(NamedTuple):
    """Re-evaluated steps, as the loss takes them."""

    logprobs: Tensor  # [L, N]
    entropy: Tensor  # [L, N]
    values: Tensor  # [L, N]


class Policy(nn.Module):
    """Actor and critic over a recurrent core; never stores recurrent state.

    The state is one tensor [B, S, H] (S = 0 for the memoryless twin): it goes in and comes out.
    With `feature_window` n, an observation passed in is the last n of the episode, oldest first,
    flattened to n * F with zeros before the episode's start (see `agents.rollout.policy_input`).
    With `low_precision`, LSTMs and layers compute in that type; all else keeps its own.
    """

    low_precision: torch.dtype | None = None
    BATCH_AXES = (1, 1, 0, 1)  # of the sequences, in the inputs of `forward`; 1 in its outputs

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
        """Orthogonal weights, zero biases, open forget gates (Jozefowicz et al. 2015)."""
        size = self.config.hidden_size
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter, math.sqrt(2.0) if "mlp" in name else 1.0)
            elif name != "log_std":
                nn.init.zeros_(parameter)
            if "bias_ih" in name:
                nn.init.ones_(parameter[size : 2 * size])  # the forget gate
        nn.init.orthogonal_(self.actor_head.weight, 0.01)

    @property
    def num_states(self) -> int:
        """Number of [B, H] vectors in the state: (h, c) of each stateful LSTM."""
        if self.config.policy == "mlp":
            return 0
        return 4 if self.config.feature_window else 6

    def initial_state(self, num_envs: int) -> Tensor:
        """Zero state [num_envs, S, H]."""
        return self.critic_head.weight.new_zeros(num_envs, self.num_states, self.config.hidden_size)

    def empty_history(self, num_envs: int) -> Tensor:
        """Zeros [num_envs, n-1, F]: the window before an episode's first observation."""
        window = max(self.config.feature_window - 1, 0)
        return self.critic_head.weight.new_zeros(num_envs, window, self.num_obs)

    def network(self, obs: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Dense pass without resets: obs [L, N, F], state [N, S, H] before them.

        Returns:
            (actor [L, N, A], values [L, N]) and the state [N, S, H] after them.
        """
        # without memory every step is a sequence of its own
        if self.config.policy == "mlp":
            with autocast(self.low_precision, obs.device):
                features = self.feature_mlp(self.feature_core(obs))
                actor = self.actor_core(features)
                critic = self.critic_core(features)
            return self._heads(actor, critic), state
        if self.config.stateless and len(obs) > 1:
            steps = obs.flatten(0, 1)[None]  # [1, L * N, F]
            outputs, _ = self.network(steps, self.initial_state(steps.shape[1]))
            return tuple(output[0].unflatten(0, obs.shape[:2]) for output in outputs), state
        if self.config.stateless:
            state = torch.zeros_like(state)

        # the cascade
        before = state.permute(1, 0, 2).contiguous()  # [S, N, H]
        features, feature_state = self.features(obs, before[4:])
        outputs, decision_state = self.decisions(features, before[:4])
        after = torch.cat([*decision_state, *feature_state]).permute(1, 0, 2)
        return outputs, after.to(state.dtype)

    def features(self, obs: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """First half of the cascade, without resets.

        Takes obs [L, N, F], or [L, N, n * F] with a window, and (h, c) of the feature LSTM before
        them, [2, N, H], or [0, N, H] with a window. Returns features [L, N, H] of the parameters'
        type, and the state after them.
        """
        with autocast(self.low_precision, obs.device):
            if self.config.feature_window:
                return self.feature_mlp(self._windowed_features(obs)).to(state.dtype), ()
            outputs, new_state = _run_lstm(self.feature_core, obs, state)
            return self.feature_mlp(outputs).to(state.dtype), new_state

    def decisions(
        self, features: Tensor, state: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """Second half of the cascade, without resets.

        Takes features [L, N, H], and (h, c) of the actor's and of the critic's LSTM before them,
        [4, N, H]. Returns (actor [L, N, A], values [L, N]) and the state after them.
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
        if self.discrete:
            return Categorical(logits=actor, validate_args=False)
        normal = Normal(actor, self.log_std.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    @torch.no_grad()
    def act(
        self, obs: Tensor, state: Tensor, episode_start: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step for B environments: obs [B, F] normalised, state [B, S, H].

        Args:
            episode_start: [B] bool, resets the state first.
            noise: [B, A] from `agents.noise`; None takes the most likely action.

        Returns:
            actions ([B, A], unclipped, or [B] int64), logprobs [B], values [B], state [B, S, H].
        """
        (actor, values), new_state = self.network(obs[None], state * ~episode_start[:, None, None])
        actor = actor[0]  # [B, A]
        if self.discrete:
            actions = (actor if noise is None else actor + noise).argmax(-1)
        else:
            actions = actor if noise is None else actor + self.log_std.exp() * noise
        logprobs = self.distribution(actor).log_prob(actions)
        return actions, logprobs, values[0], new_state

    def forward(
        self, obs: Tensor, actions: Tensor, state: Tensor, episode_start: Tensor
    ) -> Evaluation:
        """Re-evaluate stored steps: log probabilities, entropies and values, each [L, N].

        The only entry for training: DistributedDataParallel arms its reduction in `forward`. Takes
        obs [L, N, F], actions [L, N, A] or [L, N], the state [N, S, H] before the first step, and
        episode_start [L, N] bool.
        """
        if self.config.stateless:
            (actor, values), _ = self.network(obs, state)
        else:
            actor, values = run_sequence(self.network, obs, state, episode_start)
        return self.evaluate(actor, values, actions)

    def evaluate(self, actor: Tensor, values: Tensor, actions: Tensor) -> Evaluation:
        """Log probabilities and entropies of actions under the network's outputs."""
        distribution = self.distribution(actor)
        return Evaluation(distribution.log_prob(actions), distribution.entropy(), values)


def _run_lstm(lstm: nn.LSTM, inputs: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One LSTM over inputs [L, N, F] from state [2, N, H]."""
    if len(inputs) == 1 and not torch.is_grad_enabled():  # the cell is faster
        hidden, cell = torch.lstm_cell(inputs[0], (state[0], state[1]), *lstm.all_weights[0])
        return hidden[None], (hidden[None], cell[None])
    return lstm(inputs, (state[0:1], state[1:2]))


class _TanhLayer(nn.Sequential):
    """Stands in an LSTM's place in the memoryless twin."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(nn.Linear(num_inputs, num_outputs), nn.Tanh())


def check_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """Compare a policy's shape with that of weights to be loaded.

    Raises:
        UserError: they differ; one line naming the first difference.
    """
    own = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(own.keys() | saved.keys()):
        here, there = own.get(name, "absent"), saved.get(name, "absent")
        if here != there:
            raise UserError(
                f"the checkpoint is of another shape: {name} is {there} there and {here} here; use "
                "the environment, --observation, --policy and --hidden_size it was trained with"
            )
