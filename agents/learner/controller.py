"""Act with a policy outside training: in evaluations, measurements and the Python interface."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agents.learner.policy import Policy
from agents.learner.rollout import policy_input, shift_history
from envs.vector.layout import Layout, TorchEnv
from rl_dist.errors import UserError


@dataclass
class PolicyController:
    """Chooses actions with a policy, and stores the policy's state between calls.

    Without noise, these are the most likely actions. With `zero_state`, the state is reset before
    every step, to measure how much the memory helps.
    """

    policy: Policy
    normalizer: Callable[[Tensor], Tensor]
    zero_state: bool = False
    state: Tensor | None = None  # recurrent state [B, S, H]
    history: Tensor | None = None  # earlier observations of the window [B, n-1, F]

    def __call__(
        self,
        env: TorchEnv | Policy,  # only the observation layout is read
        obs: Tensor,
        episode_start: Tensor,
        scaled_noise: Tensor | None = None,
    ) -> Tensor:
        """Return actions [B, A] or [B] for observations [B, F] and scaled noise [B, A]."""
        if self.state is None or self.history is None:
            check_readable(self.policy, env.layout)
            self.state = self.policy.initial_state(len(obs))
            self.history = self.policy.empty_history(len(obs))
        start = torch.ones_like(episode_start) if self.zero_state else episode_start
        history = self.history * ~start[:, None, None]
        inputs = policy_input(self.normalizer, history, obs)
        step = self.policy.act(inputs, self.state, start, scaled_noise)
        self.actor_outputs = step.actor_outputs
        self.state = step.state
        self.history = shift_history(history, inputs)
        return step.actions

    def without_memory(self) -> "PolicyController | None":
        """Return a copy that resets the state before every step; None if not a cascaded LSTM."""
        if self.policy.config.policy != "clstm":
            return None
        return replace(self, zero_state=True)


def check_readable(policy: Policy, layout: Layout) -> None:
    """Raise a UserError if observations have other parts than during training."""
    trained = policy.layout.kinds()
    if layout.kinds() != trained:
        raise UserError(
            f"the policy was trained on observations with the parts {trained:.200}, not with the "
            f"parts {layout.kinds():.200}: use the same environment and version as in training"
        )
