"""Policies of all kinds, and random inputs for them."""

from functools import partial

import numpy as np
import torch
from gymnasium import spaces

from agents.learner.network.sequences import cut_sequences, plan_pieces
from agents.learner.policy import Policy
from agents.learner.settings import PolicyConfig
from envs.vector.layout import Layout, Part

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
DISCRETE = spaces.Discrete(3)
SEVERAL = spaces.MultiDiscrete([3, 2, 4])
small = partial(PolicyConfig, hidden_size=8)
FORMS = {
    "clstm": small(),
    "window of 1": small(feature_window=1),
    "window of 4": small(feature_window=4),
    "no memory": small(memory=False),
    "mlp": small(policy="mlp"),
    "clstm of 2 layers": small(num_layers=2),
    "lstm of 2 layers": small(policy="lstm", num_layers=2),
    "gru": small(policy="gru"),
    "gru of 2 layers": small(policy="gru", num_layers=2),
    "mingru": small(policy="mingru"),
    "separate mingrus of 2 layers": small(policy="mingru", num_layers=2, separate_trunks=True),
    "separate lstms": small(policy="lstm", separate_trunks=True),
    "own": small(policy="own", core="own_cores:Decay"),
    "own encoder, two own cores": small(
        policy="own", core="own_cores:Decay", encoder="own_encoders:Signs", separate_trunks=True
    ),
    "own encoder of windows": small(encoder="own_encoders:Signs", feature_window=3),
}
VECTOR = Layout.vector(4)
CAMERA, MASK = Part("camera", "image", (2, 9, 8)), Part("action_mask", "mask", (9,))
NESTED = Layout((CAMERA, Part("keys", "plain", (3,)), MASK, Part("pose", "vector", (2,))))
ROWS = {  # name -> configuration, action space, and layout of an observation row
    "nested rows, masks": (small(), SEVERAL, NESTED),
    "windows of nested rows, masks": (small(feature_window=2), spaces.Discrete(9), NESTED),
    "pixels": (small(policy="lstm"), DISCRETE, Layout((Part("screen", "image", (1, 68, 64)),))),
    "images, two mingrus": (small(policy="mingru", num_layers=2), BOX, Layout((CAMERA,))),
}


def make_policy(config, space=BOX, layout=VECTOR):
    torch.manual_seed(0)
    policy = Policy(config, layout, space).double()
    # With large weights, actions for different observations clearly differ.
    torch.nn.init.normal_(policy.actor_head.weight, std=1.0)
    return policy


def make_inputs(policy, num_steps=11, num_envs=5):
    """Return random observations, states, episode starts and action noise."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    obs = normal(num_steps, num_envs, max(policy.config.feature_window, 1), policy.num_obs)
    if policy.layout.is_pixels:
        obs = (obs * 255).byte()
    if columns := policy.mask_columns:
        obs[..., columns] = (obs[..., columns] > 0).double()
        first = np.cumsum([0, *policy.action_sizes[:-1]])
        obs[..., np.array(columns)[first]] = 1.0  # at least one option of every choice is allowed
    starts = torch.rand(num_steps, num_envs, generator=generator) < 0.25
    state = normal(*policy.initial_state(num_envs).shape)
    return obs.flatten(2), state, starts, normal(num_steps, num_envs, policy.num_actions)


def act(policy, obs, state, starts, noise=None):
    """Take one step in all environments; return actions, logprobs, values and state."""
    scaled_noise = None if noise is None else policy.scale_noise(noise)
    step = policy.act(obs, state, starts, scaled_noise)
    return step.actions, policy.logprobs(step.actor_outputs, step.actions), step.values, step.state


def act_stepwise(policy, obs, state, starts, noise):
    """Act step by step; return actions, logprobs, values [T, N, ...] and last state."""
    steps = []
    for given in zip(obs, starts, noise, strict=True):
        *step, state = act(policy, given[0], state, *given[1:])
        steps.append(step)
    return *map(torch.stack, zip(*steps, strict=True)), state


def network_of(policy):
    """Return the whole network, from observations to masked logits."""

    def network(obs, state):
        heads, after = policy.network(policy.encode(obs), state)
        return heads._replace(actor_outputs=policy.masked(heads.actor_outputs, obs)), after

    return network


def run_stepwise(network, obs, state, episode_start):
    """Run the network step by step, with zero state at episode starts."""
    steps = []
    for step_obs, starts in zip(obs, episode_start, strict=True):
        outputs, state = network(step_obs[None], state * ~starts[:, None, None])
        steps.append(outputs)
    return tuple(torch.cat(parts) for parts in zip(*steps, strict=True))


def planned(starts, call_steps, resets_inside=False):
    return plan_pieces(cut_sequences(starts.numpy()), starts.device, call_steps, resets_inside)


def plans_of(policy, starts):
    """Return the plans with which a policy can evaluate the same steps.

    The first is None: the policy makes its own plan. The second is a packed plan. It exists only
    if the policy has a state and can reset it inside a call.
    """
    if not policy.resets_inside or policy.config.stateless:
        return [None]
    plan = planned(starts, 1e9, True)
    assert plan.packed
    return [None, plan]
