"""Small training jobs, and what the ranks of the agents tests run; spawned processes must be able to import it."""

import functools
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import agents.trainer
from agents.clstm import PolicyConfig
from agents.ppo import PPOConfig, ppo_loss
from agents.sizes import TrainConfig
from agents.trainer import Job, Training, train
from envs import make_vector_env
from envs.market_data import Span
from envs.simulated_market import SimulatedMarketConfig, simulate_markets, world_seeds
from envs.trading import TradingVectorEnv, first_tradable_day
from envs.trading_config import TradingConfig
from rl_dist.metrics import NullWriter, open_writer
from rl_dist.strategy import parameter_hash
from rl_dist.world import StopFlag, close_world, open_world

NUM_ENVS, NUM_STEPS, ITERATIONS = 8, 16, 10
STEPS_PER_ITERATION = NUM_ENVS * NUM_STEPS
NUM_DAYS = 120
WITH_FILES = "trading, clstm"  # the job that two ranks train with a real writer
# The gradient is always clipped: clipping it before its reduction would show.
CLIPPED = PPOConfig(max_grad_norm=0.05, ent_coef=0.01, update_epochs=2, learning_rate=3e-3)
STOPPING = PPOConfig(update_epochs=4, learning_rate=1e-2, target_kl=2e-3, clip_vloss=True)
MLP = PolicyConfig(hidden_size=8, policy="mlp")
JOBS = {  # name: (task, policy, PPO, batch_size, iterations)
    "trading, clstm": ("trading", PolicyConfig(hidden_size=8), CLIPPED, 16, ITERATIONS),
    "trading, mlp": ("trading", MLP, CLIPPED, 16, 3),
    "recall, clstm": ("recall", PolicyConfig(hidden_size=8), CLIPPED, 16, ITERATIONS),
    "recall, window, strata of 2": ("recall", PolicyConfig(hidden_size=8, feature_window=3), CLIPPED, 4, 3),
    "recall, mlp, KL stop": ("recall", MLP, STOPPING, 16, 5),
}


@functools.cache
def tiny_markets():
    """Two simulated markets of few days, and the span on which they can be traded."""
    config = SimulatedMarketConfig(num_stocks=2)
    markets = []
    series_names = ("dates", "open", "high", "low", "close", "volume")
    for market in simulate_markets(config, world_seeds(config, "train", 2)):
        series = {name: getattr(market, name)[:NUM_DAYS] for name in series_names}
        markets.append(replace(market, **series))
    return markets, Span(first_tradable_day(markets[0], TradingConfig()), NUM_DAYS - 1)


def make_env(task, num_envs, first_env):
    """Trading with episodes of 7 days, or Recall with episodes of 5 steps: no multiples of a slot of 4."""
    if task == "trading":
        markets, span = tiny_markets()
        config = TradingConfig(episode_days=7)
        return TradingVectorEnv(num_envs, markets=markets, span=span, train_span=span, config=config)
    return make_vector_env("Recall-v0", num_envs, first_global_index=first_env, env_kwargs={"delay": 3})


def make_job(name, run_dir=Path("unused"), *, dtype=torch.float64, iterations=0, ppo=None, **train_options):
    """A job of JOBS: 8 environments, rollouts of 16 steps, slots of 4, and so 32 slots."""
    task, policy, own_ppo, batch_size, own_iterations = JOBS[name]
    sizes = {"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "bptt_steps": 4, "batch_size": batch_size}
    steps = {"total_steps": (iterations or own_iterations) * STEPS_PER_ITERATION, "checkpoint_every": 1000}
    return Job(
        train=TrainConfig(**(sizes | steps | train_options)),
        policy=policy,
        ppo=ppo or own_ppo,
        make_env=functools.partial(make_env, task),
        run_dir=Path(run_dir),
        dtype=dtype,
    )


@contextmanager
def world_of_one():
    """A process group of size 1 in this process, on one thread."""
    world = open_world("cpu")
    torch.set_num_threads(1)
    try:
        yield world
    finally:
        close_world(world)


class Recording(Training):
    """A training that remembers what it did."""

    def __init__(self, job, world):
        super().__init__(job, world)
        self.rollouts, self.parameters, self.losses = [], [], []
        self.hashes: list[str] = []
        self.ppo.optimizer.register_step_post_hook(lambda *_: self.hashes.append(parameter_hash(self.policy)))

    def collect(self, lifetime_step):
        rollout = super().collect(lifetime_step)
        self.rollouts.append(rollout)
        return rollout

    def update(self, rollout):
        losses = super().update(rollout)
        self.parameters.append(torch.cat([p.detach().flatten() for p in self.policy.parameters()]))
        self.losses.append(losses)
        return losses

    def record(self):
        """What the tests compare; the rollout that fills the normalisers comes first."""
        return {
            "obs": torch.stack([rollout.obs for rollout in self.rollouts]),  # [iterations + 1, T, B, F]
            "actions": torch.stack([rollout.actions for rollout in self.rollouts]),
            "rewards": torch.stack([rollout.rewards for rollout in self.rollouts]),
            "ends": torch.stack([rollout.episode_end for rollout in self.rollouts]),
            "parameters": torch.stack(self.parameters),  # [iterations, P]
            "hashes": self.hashes,
            "losses": self.losses,
            "moments": self.obs_normalizer.state_dict() | {"count_of_rewards": self.reward_normalizer.moments.count},
        }


def record_of(name, world, out_dir="", **options):
    """Train a job and return what it did; with `out_dir`, its metrics and checkpoints lie in out_dir/run."""
    run_dir = Path(out_dir, "run")
    job = make_job(name, run_dir, **options)
    writer = open_writer(run_dir, world, job.train.total_steps, "steps") if out_dir else NullWriter()
    saved: list[int] = []

    def save_checkpoint(directory, state, *, iteration, **options):
        saved.append(iteration)
        if out_dir:
            original(directory, state, iteration=iteration, **options)

    original, training = agents.trainer.save_checkpoint, Recording(job, world)
    with mock.patch.object(agents.trainer, "save_checkpoint", save_checkpoint):
        train(training, writer, StopFlag())
    writer.close()
    return training.record() | {"saved": saved, "writer": type(writer).__name__}


def train_all(out_dir):
    """Train all jobs on four ranks; then the first two go on as a job of two.

    A process costs more than its training here, so the two are not launched anew: the variables that the
    launcher sets are set again, the generation because it names the file where ranks meet. SIZE_rank_N.pt
    tell the tests what every rank did.
    """
    train_in_world(out_dir)
    if int(os.environ["RANK"]) < 2:
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT="1")
        train_in_world(out_dir)
    return 0


def train_in_world(out_dir):
    """Train all jobs in the world that the environment describes."""
    world = open_world("cpu", timeout_s=60)
    with_files = {"out_dir": out_dir, "checkpoint_every": 5, "keep_checkpoints": 5} if world.size == 2 else {}
    records = {name: record_of(name, world, **(with_files if name == WITH_FILES else {})) for name in JOBS}
    if world.size == 2:
        records["gradient"] = gradient_probe(world)
    torch.save(records, Path(out_dir, f"{world.size}_rank_{world.rank}.pt"))
    close_world(world)


def gradient_probe(world):
    """The gradient of the first minibatch: of this rank alone, and as the optimizer gets it."""
    unclipped = PPOConfig(max_grad_norm=1e6, update_epochs=1)
    training = Recording(make_job("trading, clstm", iterations=1, ppo=unclipped), world)
    parameters = list(training.policy.parameters())
    step = training.ppo._step
    found: dict[str, list[torch.Tensor]] = {}

    def probe(minibatch):
        parts = minibatch.obs, minibatch.actions, minibatch.lstm_state, minibatch.episode_start
        evaluation = training.policy(*parts)  # not through the wrapper: nothing is reduced
        stored = minibatch.logprobs, minibatch.values, minibatch.advantages, minibatch.returns
        own = torch.autograd.grad(ppo_loss(evaluation, *stored, unclipped).total, parameters)
        result = step(minibatch)
        if not found:
            reduced = [p.grad.clone() for p in parameters if p.grad is not None]
            found.update(own=list(own), reduced=reduced)
        return result

    with mock.patch.object(training.ppo, "_step", probe):
        train(training, NullWriter(), StopFlag())
    return found


def parameters_of(training):
    """All parameters of a training, one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in training.policy.parameters()])
