"""Define the policy network, by default a cascade of LSTMs (CLSTM).

In the cascade, a feature LSTM feeds an actor LSTM and a critic LSTM. Source: Zou et al., "A novel
deep reinforcement learning based automated stock trading system using cascaded LSTM networks",
https://arxiv.org/abs/2212.02721.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from agents.learner.network.cores import CORES, State, TanhCore
from agents.learner.network.inputs import Encoder
from agents.learner.network.own_core import make_core
from agents.learner.network.sequences import Plan, plan_pieces, run_sequence
from envs.vector.layout import Layout
from rl_dist.flags import Field, Text, configuration
from rl_dist.strategies.precision import autocast, weights_cast_once

# Calling one layer of a core has a fixed overhead of 0.8 ms on a CPU. In that time, a core with the
# following number of weights computes one step of one row.
CALL_WEIGHTS = 10_000_000
FORBIDDEN = -1e9  # logit of a forbidden action: its probability is exactly 0


@configuration
class PolicyConfig:
    """Architecture of the policy network, and its action noise."""

    policy: Literal["clstm", "lstm", "gru", "mingru", "mlp", "own"] = "clstm"
    """clstm: a cascade of LSTMs; lstm, gru, mingru: one recurrent core; mlp: a cascade of tanh
    layers without memory; own: the core given by --core."""
    core: Text = ""
    """Class of your own recurrent core, as module:Class; used with --policy own."""
    hidden_size: int = Field(128, ge=1, le=8192)
    """Width of every core and every layer."""
    num_layers: int = Field(1, ge=1, le=64)
    """Number of layers in every core."""
    separate_trunks: bool = False
    """Use separate cores for the actor and the critic, with --policy lstm, gru, mingru or own."""
    feature_window: int = Field(0, ge=0, le=1024)
    """0: the feature LSTM keeps its state between steps; n: at every step, it starts
    from a zero state and reads the last n observations, as in arXiv 2212.02721."""
    memory: bool = True
    """Keep the recurrent state between steps; off: zero it before every step, to measure how much
    the memory helps."""
    log_std_init: float = Field(-0.5, ge=-5, le=2)
    """Initial log standard deviation of continuous actions."""
    noise_color: float = Field(0.0, ge=0, le=2)
    """Correlation over time of the noise that is added to continuous actions: 0 is white noise, 1
    pink noise. Values from 0.5 to 1 let exploration find sparse rewards that white noise misses."""

    def __post_init__(self) -> None:
        if bool(self.core) != (self.policy == "own"):
            raise ValueError(
                f"core {self.core!r} does not fit policy {self.policy}: use --policy own --core "
                "module:Class"
            )
        if self.feature_window and self.policy != "clstm":
            raise ValueError(
                f"feature_window does not fit policy {self.policy}: omit it or use --policy clstm"
            )

    @property
    def stateless(self) -> bool:
        """Return True if the policy's outputs do not depend on earlier steps."""
        return self.policy == "mlp" or not self.memory


class Evaluation(NamedTuple):
    """Results of evaluating stored steps with the current policy."""

    logprobs: Tensor  # [L, N]
    entropy: Tensor  # [L, N]
    values: Tensor  # [L, N]


class Policy(nn.Module):
    """Actor and critic with recurrent cores; callers keep the recurrent state.

        row -> encoder -> feature core -> tanh layer -> actor core -> actions
                                                     -> critic core -> value

    A cascade has all three cores. A shared trunk has only the feature core; separate trunks have
    only the actor core and the critic core. Methods take the recurrent state as one tensor
    [B, S, H], which holds S vectors per environment, and return the new state; S is 0 for an mlp.

    With `feature_window` n, the input is the last n observations of the episode, oldest first,
    flattened to n * F numbers, with zeros for steps before the start of the episode (see
    `agents.learner.rollout.policy_input`). If `low_precision` is set, the encoder, the cores and
    the tanh layer compute in that type; the parameters and output layers keep their own type.
    """

    low_precision: torch.dtype | None = None
    BATCH_AXES = (1, 1, 0, 1)  # sequence axis of each input of `forward`; for outputs, it is 1

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

        # the encoder, then a shared core, separate cores for actor and critic, or all three cores
        size = config.hidden_size
        layers = config.num_layers
        new_core: Any = partial(make_core, config.core) if config.core else CORES[config.policy]
        self.feature_encoder = Encoder(layout, size)
        width = self.feature_encoder.num_outputs
        self.feature_core: Any = TanhCore(width, width, 0)  # 0 layers: returns its inputs
        self.feature_mlp: nn.Module = nn.Identity()
        self.actor_core: Any = self.feature_core
        self.critic_core: Any = self.feature_core
        is_cascade = config.policy in ("clstm", "mlp")
        if is_cascade or not config.separate_trunks:
            self.feature_core = new_core(width, size, layers)
            self.feature_mlp = nn.Sequential(nn.Linear(size, size), nn.Tanh())
            width = size
        if is_cascade or config.separate_trunks:
            self.actor_core = new_core(width, size, layers)
            self.critic_core = new_core(width, size, layers)
        self.cores = (self.feature_core, self.actor_core, self.critic_core)
        self.actor_head = nn.Linear(size, self.num_actions)
        self.critic_head = nn.Linear(size, 1)
        self._initialise()

        self.call_steps = 0.0  # a call's overhead takes as long as this many steps of one row
        if not (config.feature_window or self.feature_encoder.images):
            cores = [core for core in self.cores if core.num_states]
            num_weights = sum(p.numel() for core in cores for p in core.parameters())
            self.call_steps = CALL_WEIGHTS * layers * len(cores) / max(num_weights, 1)

    def _initialise(self) -> None:
        """Set orthogonal weights, zero biases, and gate biases that make cores remember."""
        for name, parameter in self.named_parameters():
            if self.config.core and "_core." in name:  # a user's core initialises itself
                continue
            if parameter.ndim >= 2:
                feeds_activation = "mlp" in name or "images" in name
                nn.init.orthogonal_(parameter, math.sqrt(2.0) if feeds_activation else 1.0)
            elif name != "log_std":
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

    @property
    def num_decision_states(self) -> int:
        """Number of actor and critic vectors; they are the first vectors of the state."""
        return int(self.actor_core.num_states + self.critic_core.num_states)

    def plan(self, starts: np.ndarray) -> Plan | None:
        """Return a plan of core calls for episode starts [L, N]; None if stateless."""
        if self.config.stateless:
            return None
        return plan_pieces(
            starts, self.critic_head.weight.device, self.call_steps, self.resets_inside
        )

    @property
    def resets_inside(self) -> bool:
        """Return True if `network` accepts resets; only one-layer LSTMs on a CPU do."""
        is_lstm = self.config.policy in ("clstm", "lstm") and self.config.num_layers == 1
        return is_lstm and self.critic_head.weight.device.type == "cpu"

    def initial_state(self, num_envs: int) -> Tensor:
        """Return a zero state [num_envs, S, H]; the feature core's vectors come last."""
        features = 0 if self.config.feature_window else self.feature_core.num_states
        num_states = self.num_decision_states + features
        return self.critic_head.weight.new_zeros(num_envs, num_states, self.config.hidden_size)

    def empty_history(self, num_envs: int) -> Tensor:
        """Return zeros [num_envs, n-1, F]: the history of an episode that begins."""
        window = max(self.config.feature_window - 1, 0)
        return self.critic_head.weight.new_zeros(num_envs, window, self.num_obs)

    def network(
        self, obs: Tensor, state: Tensor, *resets: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run L steps of N sequences, each within one episode unless resets split it.

        Takes obs [L, N, F], the state [N, S, H] before the first step, and optionally resets
        [L, N, 1]. Returns (actor [L, N, A], values [L, N]) and the state [N, S, H] after the last
        step.
        """
        before = state.permute(1, 0, 2).contiguous()  # [S, N, H]
        split = self.num_decision_states
        (features,), feature_state = self.features(obs, before[split:], *resets)
        (actor, values), states = self.decisions(features, before[:split], *resets)
        actor = self._masked(actor, obs)
        vectors = [vector for core_state in (*states, feature_state) for vector in core_state]
        after = torch.stack(vectors).permute(1, 0, 2).to(state.dtype) if vectors else state
        return (actor, values), after

    def _masked(self, logits: Tensor, obs: Tensor) -> Tensor:
        """Give forbidden choices probability 0 and no gradient; obs contains the mask."""
        if not self.mask_columns:
            return logits
        newest = obs[..., -self.num_obs :]  # a window also contains the masks of earlier steps
        first = self.mask_columns[0]
        mask = newest[..., first : first + self.num_actions]
        return torch.where(mask > 0.5, logits, FORBIDDEN)

    def features(self, obs: Tensor, state: Tensor, *resets: Tensor) -> tuple[tuple[Tensor], State]:
        """Run the first half of the cascade: encoder, feature core and tanh layer.

        Takes obs [L, N, F], or [L, N, n * F] with a window, and the feature core's state [S, N, H]
        before the first step. Returns (features [L, N, H],) in the type of the parameters, and the
        state after the last step.
        """
        window = self.config.feature_window
        with autocast(self.low_precision, obs.device):
            if window:  # run every window as n steps that start from a zero state
                rows = obs.reshape(-1, window, self.num_obs).transpose(0, 1)
                zeros = state.new_zeros(
                    self.feature_core.num_states, rows.shape[1], self.config.hidden_size
                )
                hidden, _ = self.feature_core(self.feature_encoder(rows), zeros)
                outputs, after = hidden[-1].unflatten(0, obs.shape[:2]), state
            else:
                outputs, after = self.feature_core(self.feature_encoder(obs), state, *resets)
            return (self.feature_mlp(outputs).to(state.dtype),), after

    def decisions(
        self, features: Tensor, state: Tensor, *resets: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[State, State]]:
        """Run the second half of the cascade: actor, critic and their output layers.

        Takes features [L, N, H] and the state [S, N, H] of actor and critic before the first step.
        Returns (actor [L, N, A], values [L, N]) and the states of actor and critic after the last
        step.
        """
        split = self.actor_core.num_states
        with autocast(self.low_precision, features.device):
            actor, actor_state = self.actor_core(features, state[:split], *resets)
            critic, critic_state = self.critic_core(features, state[split:], *resets)
        dtype = self.critic_head.weight.dtype
        values = self.critic_head(critic.to(dtype)).squeeze(-1)
        return (self.actor_head(actor.to(dtype)), values), (actor_state, critic_state)

    def distribution(self, actor: Tensor) -> Distribution:
        """Return the action distribution for the actor's outputs [..., A]."""
        if not self.discrete:
            parts: Distribution = Normal(actor, self.log_std.exp(), validate_args=False)
        elif self.action_sizes:
            parts = Categorical(logits=split_choices(actor, self.action_sizes), validate_args=False)
        else:
            return Categorical(logits=actor, validate_args=False)
        return Independent(parts, 1, validate_args=False)

    @torch.no_grad()
    def logprobs(self, actor: Tensor, actions: Tensor) -> Tensor:
        """Return log probabilities [...] of actions, given the actor's outputs [..., A]."""
        return self.distribution(actor).log_prob(actions)

    @torch.no_grad()
    def pushes(self, noise: Tensor) -> Tensor:
        """Scale noise [..., A] so that `act` can add it to the actor's outputs."""
        return noise if self.discrete else self.log_std.exp() * noise

    @torch.no_grad()
    def act(
        self, obs: Tensor, state: Tensor, episode_start: Tensor, push: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose actions for one step of B environments.

        Args:
            obs: normalised observations [B, F].
            state: recurrent state [B, S, H].
            episode_start: [B] bool; True resets the state of an environment before the step.
            push: noise [B, A] from `pushes`; None: take the most likely action.

        Returns:
            Actions, the actor's outputs [B, A], values [B] and the new state [B, S, H].
            Continuous actions are [B, A] and not clipped; discrete ones are int64 [B] or [B, D].
        """
        if not self.config.memory:
            episode_start = torch.ones_like(episode_start)
        state = state.masked_fill(episode_start[:, None, None], 0.0)
        (actor, values), new_state = self.network(obs[None], state)
        actor = actor[0]  # [B, A]
        actions = actor if push is None else actor + push
        if self.discrete:
            if self.action_sizes:
                actions = split_choices(actions, self.action_sizes)
            actions = actions.argmax(-1)
        return actions, actor, values[0], new_state

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
        with weights_cast_once(self.low_precision, obs.device):
            if self.config.stateless:  # run every step as a sequence
                steps = obs.flatten(0, 1)[None]
                outputs = self.network(steps, self.initial_state(steps.shape[1]))[0]
                actor, values = (output[0].unflatten(0, obs.shape[:2]) for output in outputs)
            else:
                actor, values = run_sequence(self.network, obs, state, episode_start, plan)
        return self.evaluate(actor, values, actions)

    def evaluate(self, actor: Tensor, values: Tensor, actions: Tensor) -> Evaluation:
        """Evaluate actions with the distribution that the actor's outputs define."""
        distribution = self.distribution(actor)
        return Evaluation(distribution.log_prob(actions), distribution.entropy(), values)

    def largest_entropy(self, obs: Tensor) -> Tensor:
        """Return the entropy [...] of a uniform choice among the actions allowed at obs."""
        # without masks, the entropy is the same for all obs
        logits = self._masked(obs.new_zeros(self.num_actions), obs)
        return self.distribution(logits).entropy().expand(obs.shape[:-1])


def split_choices(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split logits [..., A] into one row per action [..., D, K]; pad with FORBIDDEN."""
    rows = logits.split(sizes, -1)
    padded = [
        nn.functional.pad(row, (0, max(sizes) - row.shape[-1]), value=FORBIDDEN) for row in rows
    ]
    return torch.stack(padded, -2)
