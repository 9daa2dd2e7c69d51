"""Step vector environments in tests and compare what they return."""

import torch


def play(env, num_steps, first=0, rows=slice(None), num_envs=None):
    """Take random actions; return each output as a tensor [num_steps, B, ...].

    The outputs are obs, rewards, terminated, truncated and final_obs. An action depends only on its
    step number, counted from `first`, and on the number of its environment. If `env` holds only
    some environments of a larger batch, `num_envs` is the size of the batch, and `rows` selects
    those in `env`.
    """
    size = (num_envs or env.num_envs, *env.single_action_space.shape)
    steps = []
    for t in range(first, first + num_steps):
        choice = torch.Generator().manual_seed(t)
        actions = 2 * torch.randn(size, generator=choice)  # some actions are out of bounds
        if not env.single_action_space.shape:
            actions = torch.randint(int(env.single_action_space.n), size, generator=choice)
        *columns, info = env.step(actions[rows])
        steps.append([*columns, info["final_obs"]])
    return [torch.stack(column) for column in zip(*steps, strict=True)]


def same(left, right):
    """Return whether two lists contain equal tensors."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
