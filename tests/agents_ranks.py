"""Small training jobs, and functions that ranks run for tests/agents."""

import functools
import itertools
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import gymnasium
import numpy as np
import torch

from agents.config import RunConfig
from agents.learner.callbacks import UserCallbacks
from agents.learner.ppo import ppo_loss
from agents.learner.settings import PolicyConfig, PPOConfig, TrainConfig
from agents.learner.trainer import Training, train
from envs import make_vector_env
from envs.task import TaskConfig, TaskSettings, make_task
from envs.trading.config import SimulatedMarketConfig, TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.features import first_tradable_day
from envs.trading.market_data import Span
from envs.trading.simulated_market import simulate_markets, world_seeds
from envs.vector.batched import pack_generator, unpack_generator
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import StrategyConfig
from rl_dist.telemetry.metrics import NullWriter

NUM_ENVS = 8
NUM_STEPS = 16
ITERATIONS = 6
STEPS_PER_ITERATION = NUM_ENVS * NUM_STEPS
NUM_DAYS = 120
# In these cases, runs on two ranks save checkpoints: {case: value of checkpoint_every}.
WITH_FILES = {"trading, clstm": 3, "weak": 2}
# The norm limit is so small that every gradient is clipped: a strategy that clips gradients before
# it reduces them over ranks would end with other parameters.
CLIPPED = PPOConfig(max_grad_norm=0.05, ent_coef=0.01, update_epochs=2, learning_rate=3e-3)
STOPPING = PPOConfig(update_epochs=4, learning_rate=1e-2, target_kl=5e-4, clip_vloss=True)
# The learning rate rises and falls, and does not reach its bounds.
ADAPTIVE = PPOConfig(update_epochs=4, learning_rate=1e-3, desired_kl=1e-4, anneal_lr=False)
CLSTM = PolicyConfig(hidden_size=8)
MLP = PolicyConfig(hidden_size=8, policy="mlp")
WINDOW = PolicyConfig(hidden_size=8, feature_window=3)
GRU = PolicyConfig(hidden_size=8, policy="gru", num_layers=2)
MINGRUS = PolicyConfig(hidden_size=8, policy="mingru", separate_trunks=True)
PINK = PolicyConfig(hidden_size=8, policy="lstm", noise_color=1.0)
OWN = PolicyConfig(hidden_size=8, policy="own", core="own_cores:Decay")
ENCODED = PolicyConfig(hidden_size=8, policy="lstm", encoder="own_encoders:Signs")
REFRESHED = replace(CLIPPED, refresh_states=True)


class Case(NamedTuple):
    """Settings of a training run that tests repeat on different numbers of ranks."""

    task: str
    policy: PolicyConfig
    ppo: PPOConfig = CLIPPED
    batch_size: int = 16
    iterations: int = 3
    options: dict[str, Any] = {}  # fields of TrainConfig
    dtype: torch.dtype = torch.float64


JOBS = {
    "trading, clstm": Case("trading", CLSTM, iterations=ITERATIONS),
    "trading, mlp": Case("trading", MLP, iterations=ITERATIONS),
    "recall, clstm": Case("recall", CLSTM),
    "recall, window, strata of 2": Case("recall", WINDOW, batch_size=4),
    "recall, mlp, KL stop": Case("recall", MLP, STOPPING, iterations=5),
    "recall, mlp, adaptive rate": Case("recall", MLP, ADAPTIVE),
    "orders, gru, masks of nested actions": Case("orders", GRU),
    "patches, mingrus, last action and reward": Case("patches", MINGRUS),
    "levers, own core, masks of info": Case("levers", OWN),
    "orders, lstm, own encoder": Case("orders", ENCODED),
    "screens, lstm": Case("screens", replace(PINK, noise_color=0.0), REFRESHED),
    "cockpit, gru": Case("cockpit", GRU),
    "brief, lstm, pink noise, refreshed": Case("brief", PINK, REFRESHED),
    "walk, clstm, batch of tensors": Case("walk", CLSTM),
}
MORE_JOBS = {
    "cartpole, clstm": Case("cartpole", CLSTM, iterations=ITERATIONS),
    "cartpole, clstm, fp32": Case("cartpole", CLSTM, dtype=torch.float32),
}
SLOW_JOBS = {
    "trading, no memory": Case("trading", replace(CLSTM, memory=False)),
    "trading, KL stop": Case("trading", CLSTM, STOPPING),
    "trading, nothing normalised, strata of 2, sequences as long as rollouts": Case(
        "trading",
        CLSTM,
        replace(CLIPPED, norm_adv=False),
        batch_size=4,
        options={"bptt_steps": 16, "normalize_obs": False, "normalize_rewards": False},
    ),
    "cartpole, warm-up, annealed by episodes, sequences of one step": Case(
        "cartpole",
        CLSTM,
        replace(CLIPPED, warmup=3),
        batch_size=64,
        options={"total_steps": 0, "num_episodes": 80, "bptt_steps": 1},
    ),
    "brief, sums that lose digits": Case("brief", MLP, batch_size=64, options={"num_steps": 64}),
    "brief, rollouts of one step": Case(
        "brief", CLSTM, batch_size=4, options={"num_steps": 1, "bptt_steps": 1}
    ),
}
TWELVE = "twelve, cartpole, strata of 4"  # 12 environments can also be split among 3 ranks
WEAK = Case(
    "recall",
    CLSTM,
    batch_size=8,
    iterations=4,
    options={"scaling": "weak", "num_envs": 4, "lr_scaling": "linear"},
)
CASES = (
    JOBS
    | MORE_JOBS
    | SLOW_JOBS
    | {
        "weak": WEAK,
        TWELVE: Case("cartpole", CLSTM, batch_size=9, options={"num_envs": 12, "num_steps": 12}),
    }
)


@dataclass(frozen=True)
class Job:
    """A run as the learner sees it, and its environments."""

    config: RunConfig
    make_env: Any
    run_dir: Path
    strategy: StrategyConfig = StrategyConfig()

    @property
    def directory(self):
        return RunDir(self.run_dir)


@functools.cache
def tiny_markets():
    """Return two simulated markets, and a span of tradable days that ends on day 120."""
    config = SimulatedMarketConfig(num_stocks=2)
    markets = simulate_markets(config, world_seeds(config, "train", 2))
    return markets, Span(first_tradable_day(markets[0], TradingConfig()), NUM_DAYS - 1)


class Brief(gymnasium.Env):
    """Environment with short episodes; actions shift two observed features.

    The seed limits all episodes to 1, 2 or 9 steps. The last feature varies by a millionth of
    its value, as a date or a price may.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)
    kept = ("left", "longest", "place")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.longest = int(self.np_random.choice([1, 2, 9]))
        self.left = int(self.np_random.integers(1, self.longest, endpoint=True))
        self.place = self.np_random.normal(size=3)
        return self.seen(), self.info()

    def info(self):
        return {}

    def seen(self):
        return np.append(self.place, 1e6 + self.np_random.normal()).astype(np.float32)

    def step(self, action):
        self.left -= 1
        self.place[:2] += 0.3 * action
        ended = self.left == 0
        cut = bool(self.np_random.random() < 0.1)
        reward = -float(abs(self.place).sum())
        return self.seen(), reward, ended, cut and not ended, self.info()

    def get_state(self):
        kept = {name: getattr(self, name) for name in self.kept}
        return kept | {"rng": pack_generator(self.np_random)}

    def set_state(self, state):
        vars(self).update({name: state[name] for name in self.kept})
        unpack_generator(self.np_random, state["rng"])


class Levers(Brief):
    """Like Brief, but the actions are two levers; a mask forbids one lever position."""

    action_space = gymnasium.spaces.MultiBinary(2)

    def info(self):
        mask = np.ones((2, 2), np.int8)
        mask[tuple(self.np_random.integers(2, size=2))] = 0
        return {"action_mask": mask.ravel()}


class Screens(Brief):
    """Like Brief, but a screen shows the two features; the upper part is noise."""

    observation_space = gymnasium.spaces.Box(0, 255, (68, 64, 1), np.uint8)

    def seen(self):
        screen = self.np_random.integers(0, 256, (68, 64, 1), np.uint8)
        screen[20:, :18], screen[20:, 18:] = np.clip(128 + 40 * self.place[:2], 0, 255)
        return screen


class Cockpit(Screens):
    """Like Screens, with the third feature as a number beside the screen."""

    observation_space = gymnasium.spaces.Dict(
        screen=Screens.observation_space, height=gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    )

    def seen(self):
        return {"screen": super().seen(), "height": self.place[2:].astype(np.float32)}


gymnasium.register("Screens-v0", entry_point=Screens)
gymnasium.register("Cockpit-v0", entry_point=Cockpit)
gymnasium.register("Brief-v0", entry_point=Brief)
gymnasium.register("Levers-v0", entry_point=Levers)


ENV_IDS = {
    "recall": "Recall-v0",
    "cartpole": "CartPole-v1",
    "brief": "Brief-v0",
    "levers": "Levers-v0",
    "screens": "Screens-v0",
    "cockpit": "Cockpit-v0",
    "orders": "examples.many_spaces:Orders-v0",
    "patches": "examples.many_spaces:PatchRecall-v0",
}


def make_env(task, num_envs, env_offset):
    """Make the environments of a task.

    Episodes last 7 days in trading and 5 steps in Recall: neither is a multiple of the 4 steps of a
    sequence.
    """
    if task == "trading":
        markets, span = tiny_markets()
        config = TradingConfig(episode_days=7)
        return TradingVectorEnv(
            num_envs, markets=markets, span=span, train_span=span, config=config
        )
    if task == "walk":
        settings = TaskSettings(task=TaskConfig(env="fake_batches:Walk"))
        return make_task(settings).training_env(num_envs, env_offset)
    env_id = ENV_IDS[task]
    env_kwargs = {"delay": 3} if task == "recall" else {}
    extra = {"previous_action": True, "previous_reward": True} if task == "patches" else {}
    extra |= {"info_mask": True} if task == "levers" else {}
    return make_vector_env(env_id, num_envs, env_offset=env_offset, env_kwargs=env_kwargs, **extra)


@functools.cache
def scratch():
    """Return a directory for output that no test reads; it is deleted at exit."""
    return tempfile.TemporaryDirectory(prefix="ranks_")


def make_job(name, run_dir="", *, dtype=None, iterations=0, ppo=None, **train_options):
    """Return the job of a case.

    Default sizes: 8 environments, rollouts of 16 steps, 32 sequences of 4 steps.
    """
    case = CASES[name]
    options = {
        "num_envs": NUM_ENVS,
        "num_steps": NUM_STEPS,
        "bptt_steps": 4,
        "batch_size": case.batch_size,
        "checkpoint_every": 1000,
        "monitor_every": 0,
        **case.options,
        **train_options,
    }
    # Under weak scaling, num_envs is per rank; the case with weak scaling is trained by two ranks.
    num_envs = options["num_envs"] * (2 if options.get("scaling") == "weak" else 1)
    steps = (iterations or case.iterations) * num_envs * options["num_steps"]
    options.setdefault("total_steps", steps)
    precision = "fp64" if (dtype or case.dtype) == torch.float64 else "fp32"
    return Job(
        config=RunConfig(
            launch=LaunchConfig(precision=precision),
            train=TrainConfig(**options),
            policy=case.policy,
            ppo=ppo or case.ppo,
        ),
        make_env=functools.partial(make_env, case.task),
        run_dir=Path(run_dir or scratch().name),
    )


@contextmanager
def world_of_one():
    """Open a process group of size 1 in this process, with one torch thread."""
    world = open_world("cpu")
    torch.set_num_threads(1)
    try:
        yield world
    finally:
        close_world()


class Recording(Training):
    """Training that keeps its rollouts, parameters, losses and parameter hashes."""

    def __init__(self, job, world, saved_num_envs=0):
        super().__init__(job, job.make_env, world, saved_num_envs=saved_num_envs)
        self.rollouts = []
        self.parameters = []
        self.losses = []
        # iteration -> KL, clip fraction and sample count in its first gradient step
        self.firsts = {}
        self.hashes: list[str] = []
        self.ppo.optimizer.register_step_post_hook(
            lambda *_: self.hashes.append(parameter_hash(self.policy))
        )
        self.step = self.ppo.step
        self.ppo.step = self.recorded_step

    def recorded_step(self, minibatch, plans):
        result = self.step(minibatch, plans)
        first = (
            result.ppo_approx_kl,
            result.ppo_clip_fraction,
            self.normalizers.obs.moments.count,
        )
        self.firsts.setdefault(self.iteration, [float(number) for number in first])
        return result

    def collect(self):
        rollout = super().collect()
        self.rollouts.append(rollout)
        return rollout

    def update(self, rollout):
        losses = super().update(rollout)
        self.parameters.append(parameters_of(self))
        self.losses.append(losses)
        return losses

    def record(self):
        """Return the data, parameters, losses and statistics that the tests compare.

        The first rollout is the warm-up, which only fills the normalisers.
        """
        fields = {"obs": "obs", "actions": "actions", "rewards": "rewards", "ends": "episode_end"}
        return {  # data: [iterations + 1, T, B, ...]
            name: torch.stack([getattr(rollout, field) for rollout in self.rollouts])
            for name, field in fields.items()
        } | {
            "parameters": torch.stack(self.parameters),  # [iterations, P]
            "hashes": self.hashes,
            "losses": self.losses,
            "firsts": self.firsts,
            "moments": self.normalizers.obs.state_dict()
            | {"count_of_rewards": self.normalizers.rewards.moments.count},
        }


def run_loop(training, writer=None, stop=None, validate=None):
    """Train without callbacks; return the number of the signal that stopped the run."""
    callbacks = UserCallbacks({}, training.run.directory, training.policy, training.world)
    return train(training, writer or NullWriter(), stop or StopFlag(), callbacks, validate)


def finish(training, resume_from=""):
    """Train to the end, optionally from a checkpoint; return `training`."""
    if resume_from:
        training.restore(load_checkpoint(resume_from))
    run_loop(training)
    return training


def changed_losses(change):
    """Replace results of `ppo_loss` by change(call, result); calls count from 1."""
    numbers = itertools.count(1)
    return mock.patch(
        "agents.learner.ppo.ppo_loss", lambda *args: change(next(numbers), ppo_loss(*args))
    )


def bad_losses(calls, factor=torch.nan):
    """Multiply the total loss by `factor` in these calls of `ppo_loss`."""

    def change(number, parts):
        return parts._replace(total=parts.total * factor) if number in calls else parts

    return changed_losses(change)


def record_of(name, world, run_dir="", **options):
    """Train a job and return its record; save checkpoints in `run_dir`."""
    return finish(Recording(make_job(name, run_dir, **options), world)).record()


def train_all(out_dir, names_by_size):
    """Train the cases in `names_by_size` on each number of ranks, the largest first.

    Starting new processes would take longer than the training itself. Therefore some processes of
    the largest world then form the smaller worlds: they change the environment variables that the
    launcher set. Each world has its own restart count and therefore its own rendezvous file. Rank N
    of SIZE ranks saves its records in SIZE_rank_N.pt.
    """
    for generation, (size, names) in enumerate(names_by_size.items()):
        if int(os.environ["RANK"]) >= size:
            break
        os.environ.update(
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            TORCHELASTIC_RESTART_COUNT=str(generation),
        )
        train_in_world(Path(out_dir), names)
    return 0


def train_in_world(out_dir, names):
    """Train the named cases in the world that the environment variables describe."""
    world = open_world("cpu", timeout_s=60)
    records = {}
    for name in names:
        files = {}
        if world.size == 2 and name in WITH_FILES:
            files = {"run_dir": out_dir / name, "checkpoint_every": WITH_FILES[name]}
        records[name] = record_of(name, world, **files)
    torch.save(records, out_dir / f"{world.size}_rank_{world.rank}.pt")
    close_world()


def parameters_of(training):
    """Return all policy parameters of a training run as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in training.policy.parameters()])


def count_small_collectives(out_dir):
    """Count the collective calls and gradient steps of an iteration; save the counts."""
    quiet = {"sync_check_every": 0, "checkpoint_every": 100, "keep_best": "off"}
    job = make_job("recall, clstm", out_dir, iterations=3, dtype=torch.float32, **quiet)
    world = open_world("cpu", timeout_s=60)
    calls = []

    class Counting(NullWriter):
        def write(self, record, *, done):
            calls.append((world.doing.calls, int(record["optim/steps"])))

    run_loop(Training(job, job.make_env, world), Counting())
    (before, _), (after, steps) = calls[1:]
    Path(out_dir, f"calls_{world.rank}").write_text(json.dumps([after - before, steps]))
    close_world()
