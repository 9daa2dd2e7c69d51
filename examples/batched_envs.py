"""Batches of environments for `--env module:name`: EnvPool, gymnax, mjlab, and one in pure torch.

A process makes one batch for all its environments. Run these commands in the root of the checkout,
or copy what you need into your own module:

    python train_distributed.py --env examples.batched_envs:CartPole --total_steps 100000
    python train_distributed.py --env examples.batched_envs:EnvPool --total_steps 100000
    python train_distributed.py --env examples.batched_envs:make_gymnax --total_steps 150000
    python train_distributed.py --env examples.batched_envs:make_mjlab --total_steps 100000 \
        --num_envs 64 --num_steps 32 --batch_size 16

`--env_kwargs '{"task": "Pong-v5"}'` chooses another task of a package. docs/own_environment.md
describes what a batch must offer, and docs/guarantees.md which promises hold for which batch.
"""

from functools import partial

import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper

from envs.vector.tensors import random_int63, seed_keys


class CartPole:
    """The task CartPole-v1 in pure torch: a batch of tensors for which every promise holds.

    The environments live on the device of the policy. For a task of your own, keep these parts:

    - `reset` gets a list with one seed per environment, because `seeds_each` is True. The random
      numbers of an environment are hashes of its seed and a counter. They do not depend on the
      other environments, so training is the same on any number of ranks.
    - `step` starts the next episode in the step that ends one, and returns the last observations
      as final_obs. It chooses rows with torch.where, because `if ended.any()` would make the CPU
      wait for the GPU.
    - `get_state` returns everything that the future depends on, so a killed run resumes exactly.
      To check this: `python -m rl_dist.resume_check --env examples.batched_envs:CartPole`.

    Install nothing: it needs only torch.
    """

    seeds_each = True
    single_action_space = spaces.Discrete(2)  # push to the left or to the right

    def __init__(self, num_envs, device):
        """Remember size and device. All attributes are tensors [B, ...], see `get_state`."""
        self.keys = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, *, seed):
        """Start an episode in each environment from its seed; return observations [B, 4] and {}."""
        self.keys = seed_keys(seed).to(self.keys.device)
        self.episodes = torch.zeros_like(self.keys)  # [B], number of episodes that have ended
        self.ages = torch.zeros_like(self.keys)  # [B], steps in the current episode
        self.physics = self.first_physics()  # [B, 4]: position, speed, angle, angular speed
        return self.physics, {}

    def first_physics(self):
        """Draw the first state of an episode for all environments, [B, 4] in [-0.05, 0.05]."""
        counter = 4 * self.episodes[:, None] + torch.arange(4, device=self.keys.device)
        return random_int63(self.keys[:, None], counter).double() / 2**63 * 0.1 - 0.05

    def step(self, actions):
        """Push each cart to the left (0) or to the right (1), actions [B]."""
        # from gymnasium/envs/classic_control/cartpole.py
        _, speed, angle, spin = self.physics.unbind(dim=1)
        sine = angle.sin()
        cosine = angle.cos()
        push = (20 * actions - 10 + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (2 / 3 - 0.05 * cosine**2 / 1.1)
        changes = [speed, push - 0.05 * turn * cosine / 1.1, spin, turn]
        last = self.physics + 0.02 * torch.stack(changes, dim=1)

        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 0.2095)
        truncated = self.ages + 1 >= 500
        ended = terminated | truncated
        self.ages = (self.ages + 1) * ~ended
        self.episodes = self.episodes + ended
        self.physics = torch.where(ended[:, None], self.first_physics(), last)
        # The mean of each number in "log" over an iteration is a metric, here env/angle.
        info = {"final_obs": last, "log": {"angle": last[:, 2].abs().mean()}}
        return self.physics, torch.ones_like(speed), terminated, truncated, info

    def get_state(self):
        """Return a complete snapshot, tensors [B, ...] by name."""
        return dict(vars(self))

    def set_state(self, state):
        """Restore a snapshot, whose numbers arrive as float64 and int64 on the CPU."""
        for name, values in state.items():
            setattr(self, name, values.to(self.keys.device))


class EnvPool(VectorWrapper):
    """EnvPool: thousands of C++ environments, such as Atari and MuJoCo, stepped by threads.

    EnvPool takes seeds only when a batch is made, so `reset` with seeds makes a new batch. The next
    episodes start through reset_mask, which EnvPool knows, so last observations are exact.

    Install: `pip install envpool` (run with 1.2.5). Training is the same on any number of ranks,
    because `seeds_each` is True. A resume starts new episodes: EnvPool cannot save its state.
    """

    seeds_each = True

    def __init__(self, num_envs, task="CartPole-v1", **options):
        """Make a batch of one of EnvPool's tasks; `options` are passed to EnvPool."""
        import envpool

        self.make = partial(envpool.make_gymnasium, task, num_envs=num_envs, **options)
        super().__init__(self.make())

    def reset(self, *, seed=None, options=None):
        """Start all environments from a list of seeds, or those of options["reset_mask"]."""
        if seed is not None:
            self.env.close()
            self.env = self.make(env_seed=seed)
        return self.env.reset(options=options)


def make_gymnax(num_envs, task="CartPole-v1"):
    """gymnax: environments in JAX, compiled for the CPU or the GPU.

    Arrays go from JAX to torch and back through dlpack, without a copy. Every environment has its
    own random key, made from its own seed. The same pattern fits other libraries in JAX.

    Install: `pip install 'gymnax>=1.0'` (run with 1.0.1 and jax 0.10.2 on a CPU), which needs a
    Gymnasium below 1.4, such as 1.3.0; with constraints.txt, pip chooses a gymnax that is too old.
    On a GPU, also install `jax[cuda12]` and set XLA_PYTHON_CLIENT_PREALLOCATE=false, so that JAX
    leaves memory to torch.
    Training is the same on any number of ranks, because `seeds_each` is True. A resume starts new
    episodes; to make it exact, return the leaves of the keys and the state in `get_state`.
    """
    import gymnax
    import jax

    env, params = gymnax.make(task)
    split_keys = jax.jit(jax.vmap(jax.random.split, out_axes=1))
    reset_rows = jax.jit(jax.vmap(env.reset, in_axes=(0, None)))
    step_rows = jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None)))

    class Gymnax:
        seeds_each = True
        single_action_space = spaces.Discrete(env.num_actions)

        def reset(self, *, seed):
            keys = jax.vmap(jax.random.key)(jax.numpy.array(seed))
            self.keys, keys = split_keys(keys)
            obs, self.state = reset_rows(keys, params)
            return torch.from_dlpack(obs), {}

        def step(self, actions):
            self.keys, keys = split_keys(self.keys)
            actions = jax.numpy.from_dlpack(actions.int())
            obs, self.state, *outcome, info = step_rows(keys, self.state, actions, params)
            arrays = obs, *outcome, info["final_observation"]
            *outcome, final_obs = map(torch.from_dlpack, arrays)
            return *outcome, {"final_obs": final_obs}

    return Gymnax()


def make_mjlab(num_envs, device, seed, task="Mjlab-Cartpole-Balance"):
    """mjlab: robots and control tasks in MuJoCo-Warp, simulated on the GPU or, slowly, on the CPU.

    By default, mjlab starts the next episode without returning the last observation. Here it does
    not (auto_reset=False): `step` keeps a copy and then resets the rows whose episodes ended, so
    values at time limits are exact.

    Install: `pip install mjlab` (run with 1.6.0 on a CPU). All environments share one seed, so
    training depends on the number of ranks; a resume starts new episodes. The policy reads the
    group "actor" of the observations, as in mjlab's own training.
    """
    import mjlab.tasks  # noqa: F401, because it registers the tasks
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg

    class MjlabEnv(ManagerBasedRlEnv):
        def step(self, actions):
            obs, rewards, terminated, truncated, info = super().step(actions)
            final_obs = {name: rows.clone() for name, rows in obs.items()}
            ended = (terminated | truncated).nonzero()[:, 0]
            if len(ended):
                obs, _ = self.reset(env_ids=ended)
            return obs, rewards, terminated, truncated, {**info, "final_obs": final_obs}

    config = load_env_cfg(task)
    config.scene.num_envs = num_envs
    config.seed = seed
    config.auto_reset = False
    return MjlabEnv(config, device=device)
