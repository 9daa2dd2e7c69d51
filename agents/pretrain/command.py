"""Train the feature LSTM on market data, before PPO: what will tomorrow bring?

    python -m agents.pretrain [--data FILE] [--num_gpus 2 --device cpu] ...
    python train_distributed.py --pretrained RUN_DIR

After every day of a window of days it tells, for each stock, whether the next day's return is positive, and how
volatile the next days will be. Trained on the training span, stopped by the validation span; the test span is never
looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from agents.normalize import Normalizer
from agents.policy import Policy, PolicyConfig
from agents.pretrain.weights import KIND, FeatureTraining
from agents.pretrain.windows import MarketWindows, as_batch
from agents.run.config import discard_unstarted, fresh_directory, save_config
from envs.task import TaskConfig, check_flags
from envs.trading.config import TradingConfig
from envs.trading.market_data import DataConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from envs.trading.task import TradingTask, prepare_task
from rl_dist.checkpoint.folder import CHECKPOINT_DIR
from rl_dist.checkpoint.run_lock import RunLock, hold, hold_new
from rl_dist.config import ParsedFlags, flag, given_once, parse_flags, read_sections, saved_form
from rl_dist.errors import UserError, explains_errors
from rl_dist.hardware.plain_files import leads_to, read_plain
from rl_dist.launch.launcher import LaunchConfig, ResolvedLaunch, launch, resolve, restart_count
from rl_dist.launch.training_process import as_flags
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.world import World, open_world
from rl_dist.supervised.fit import FitConfig, FitResult, fit
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import setup_logging, write_whole

RUNS = Path("runs", "pretrain")  # apart from those of PPO, of which --resume auto takes the newest
DEFAULTS = {"epochs": 20, "patience": 3, "max_grad_norm": 1.0}
VOLATILITY_WEIGHT = 0.5  # in the loss, beside the sign
CONFIG_FILE, SUMMARY = "config.json", "summary.json"
EPILOG = """examples:
  python -m agents.pretrain                                    on the simulated markets
  python -m agents.pretrain --num_gpus 2 --device cpu          the same with two CPU ranks
  python -m agents.pretrain --data prices.csv --train_end 2015-12-31 --test_start 2018-01-02
  python train_distributed.py --pretrained runs/pretrain/2026-01-31_12-00-00
exit codes: 0 done, 1 failed, 2 bad usage, 130, 143, 138 and 129 stopped by INT, TERM, USR1 and HUP"""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """What the feature LSTM is, and what it is shown."""

    hidden_size: int = flag(128, "width of the feature LSTM, as in --hidden_size of training", "units")
    observation: str = flag("relative", "as in --observation of training", choices=("relative", "paper"))
    window: int = flag(60, "length of a training sequence; the state is zero at its start", "days")
    batch_size: int = flag(64, "sequences in a batch, total over all ranks", "sequences")
    learning_rate: float = flag(1e-3, "Adam's learning rate")
    num_workers: int = flag(0, "processes of each rank that load batches; 0 = the rank itself", "processes")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("hidden_size", 1, 8192),
            ("window", 2, 10**5),
            ("batch_size", 1, 10**7),
            ("learning_rate", 0.0, 10.0),
            ("num_workers", 0, 1024),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low:g}..{high:g}, got {value:g}")
        if self.observation not in ("relative", "paper"):
            raise ValueError(f"observation must be relative or paper, got {self.observation!r}")


def check_launch(config: LaunchConfig) -> None:
    """Refuse what only PPO has.

    Raises:
        UserError: a strategy that is measured or tried, or that cuts the cascade.
    """
    if config.strategy == "auto" or config.fallback:
        asked = "--fallback" if config.fallback else "--strategy auto"
        raise UserError(f"{asked} is for train_distributed.py only: name a strategy, or leave it out")
    if config.hybrid_form == "pipeline":
        raise UserError("hybrid_form pipeline cuts the whole policy, of which this is a part: use --hybrid_form shard")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a pre-training; config.json holds it."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    market: SimulatedMarketConfig = field(default_factory=SimulatedMarketConfig)

    def to_dict(self) -> dict[str, Any]:
        """What files hold of it."""
        return saved_form(self)

    def prepare_task(self) -> TradingTask:
        """The markets and their spans, as PPO sees them."""
        task = prepare_task(self.data, self.market, TradingConfig(observation=self.pretrain.observation))
        if task.spans.valid is None:
            raise UserError("there is no validation span to stop by: give --valid_start and --valid_end")
        return task


SECTIONS: dict[str, type] = {
    "launch": LaunchConfig,
    "fit": FitConfig,
    "pretrain": PretrainConfig,
    "data": DataConfig,
    "market": SimulatedMarketConfig,
}
OWNERS = {item.name: name for name, section in SECTIONS.items() for item in dataclasses.fields(section)}
# What a resumed run may change: how long, and where it runs.
CHANGEABLE = {"epochs", "patience", "keep_checkpoints", "progress", "num_workers"} | {
    item.name for item in dataclasses.fields(LaunchConfig) if item.name != "precision"
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the signs, and square error of the volatilities.

    Outputs and targets: [N, days, 2, n].
    """
    signs = functional.binary_cross_entropy_with_logits(outputs[:, :, 0], targets[:, :, 0].to(outputs.dtype))
    return signs + VOLATILITY_WEIGHT * functional.mse_loss(outputs[:, :, 1], targets[:, :, 1].to(outputs.dtype))


def sign_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each sign was told, [N, days, n] bool."""
    return (outputs[:, :, 0] > 0) == (targets[:, :, 0] > 0.5)


def volatility_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Square errors of the standardised log volatilities, [N, days, n].

    Always telling the mean gives about 1.
    """
    return (outputs[:, :, 1] - targets[:, :, 1]).square()


METRICS = {"sign_accuracy": sign_accuracy, "volatility_error": volatility_error}


def make_windows(config: RunConfig, task: TradingTask) -> tuple[MarketWindows, MarketWindows]:
    """What trains (overlapping windows), and what validates (every day once)."""
    assert task.spans.valid is not None
    days = config.pretrain.window
    train = MarketWindows(
        task.markets("train"), task.spans.train, task.trading, days=days, stride=max(1, days // 2), seed=config.fit.seed
    )
    valid = MarketWindows(
        task.markets("valid"),
        task.spans.valid,
        task.trading,
        days=days,
        stride=days,
        seed=config.fit.seed,
        volatility_scale=train.volatility_scale,
    )
    return train, valid


def fill_moments(normalizer: Normalizer, windows: MarketWindows) -> None:
    """Mean and deviation of all observations that train, alike on every rank."""
    for _ in range(2):  # once more around the mean: a large offset would cost digits
        normalizer.moments.restart()
        for first in range(0, len(windows), 1024):
            obs, _ = windows.__getitems__(range(first, min(first + 1024, len(windows))))
            normalizer.moments.merge(normalizer.moments.sums(obs))


def make_module(config: RunConfig, windows: MarketWindows) -> FeatureTraining:
    """The feature LSTM as the policy begins with it, and its head."""
    torch.manual_seed(config.fit.seed)
    shape = PolicyConfig(hidden_size=config.pretrain.hidden_size)
    policy = Policy(shape, windows.num_obs, spaces.Box(-1.0, 1.0, (windows.num_stocks,)))
    module = FeatureTraining(policy, windows.num_stocks)
    fill_moments(module.normalizer, windows)
    for name, part in module.named_children():
        if name != "normalizer":
            part.to(config.launch.dtype)
    return module


def run_fit(
    config: RunConfig, world: World, run_dir: Path, resume: bool, gpu_ids: tuple[int, ...] = ()
) -> tuple[FitResult, dict[str, Any]]:
    """Train on this rank; what became of it, and the figures of the best epoch."""
    task = config.prepare_task()
    train, valid = make_windows(config, task)
    strategy = Strategy(dataclasses.replace(config.launch.strategy_config, device_ids=gpu_ids), world)
    module: nn.Module = strategy.wrap(make_module(config, train).to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=config.pretrain.learning_rate)
    size, workers = config.pretrain.batch_size, config.pretrain.num_workers
    result = fit(
        module,
        DataLoader(train, batch_size=size, shuffle=True, collate_fn=as_batch, num_workers=workers),
        optimizer,
        loss,
        strategy,
        validation=DataLoader(valid, batch_size=size, collate_fn=as_batch, num_workers=workers),
        metrics=METRICS,
        config=config.fit,
        run_dir=run_dir,
        resume=resume,
        extra={
            "kind": KIND,
            "config": json.dumps(config.to_dict()),
            "observation": config.pretrain.observation,
            "num_obs": train.num_obs,
            "num_stocks": train.num_stocks,
            "hidden_size": config.pretrain.hidden_size,
        },
    )
    if not (result.best_epoch or result.signum):
        raise UserError("the validation loss was never finite: lower --learning_rate", exit_code=1)
    _, targets = valid.__getitems__(range(len(valid)))
    up = float(targets[:, :, 0].mean())
    found = result.history[result.best_epoch - 1] if result.best_epoch else {}
    guessed = {"sign_accuracy": max(up, 1.0 - up), "volatility_error": float(targets[:, :, 1].square().mean())}
    return result, {"best_epoch": result.best_epoch, "epochs": len(result.history), "best": found, "guessed": guessed}


def run_rank(config: RunConfig, resolved: ResolvedLaunch, run_dir: Path, resume: bool, lock: RunLock | None) -> int:
    """What every rank does; returns the exit code.

    The lock goes along, so that no rank outlives it.
    """
    world = open_world(resolved.device_type, gpu_ids=resolved.gpu_ids)
    run_dir = Path(gather_json(str(run_dir), world)[0])  # torchrun's ranks may have chosen differently
    if world.main:
        events.configure(config.launch.on_event, run_dir)
    setup_logging(run_dir, world.rank)
    result, summary = run_fit(config, world, run_dir, resume or restart_count() > 0, resolved.gpu_ids)
    if result.signum:
        if world.main:
            print(f"stopped by signal {result.signum}; go on with --resume {run_dir}")
        return 128 + result.signum
    if world.main:
        write_whole(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        print(_result_text(summary), flush=True)
        print(f"next: {next_command(config, run_dir)}", flush=True)
    return 0


def next_command(config: RunConfig, run_dir: Path) -> str:
    """The training that starts from it: same data, a policy that it fits."""
    words = ["python", "train_distributed.py", "--pretrained", str(run_dir)]
    for section in (config.pretrain, config.data, config.market):
        shared = ("hidden_size", "observation") if section is config.pretrain else tuple(vars(section))
        default = type(section)()
        words += as_flags({n: getattr(section, n) for n in shared if getattr(section, n) != getattr(default, n)})
    return shlex.join(words)


def _result_text(summary: dict[str, Any]) -> str:
    best, guessed = summary["best"], summary["guessed"]
    return (
        f"best epoch {summary['best_epoch']} of {summary['epochs']}, on the validation span: next day's sign right in "
        f"{best['valid/sign_accuracy']:.1%} (always the more frequent: {guessed['sign_accuracy']:.1%}), square error "
        f"of the log volatility {best['valid/volatility_error']:.3f} (a constant: {guessed['volatility_error']:.3f})"
    )


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--run_dir", default="", metavar="DIR", help=f"where to write (default: {RUNS}/DATE_TIME)")
    group.add_argument("--resume", default="", metavar="DIR", help="go on with this pre-training")


def choose_run(parsed: ParsedFlags) -> tuple[RunConfig, Path | None, bool]:
    """Configuration, run directory (None: not named), and whether to resume.

    Raises:
        UserError: flags that do nothing or differ from the run to resume.
    """
    check_flags(TaskConfig(), parsed.configs["data"].data == "simulated", parsed.given, OWNERS)
    if parsed.extra.resume:
        if parsed.extra.run_dir:
            raise UserError(f"--run_dir does nothing with --resume {parsed.extra.resume}: leave it out")
        run_dir = Path(parsed.extra.resume)
        return _resumed(run_dir, parsed), run_dir, True
    config = RunConfig(**parsed.with_defaults(DEFAULTS).configs)
    if not parsed.extra.run_dir:
        return config, None, False
    run_dir = Path(parsed.extra.run_dir)
    if os.environ.get("RANK", "0") == "0" and run_dir.is_dir() and any(run_dir.iterdir()):
        resumable = f"go on with --resume {run_dir}, or " if (run_dir / CHECKPOINT_DIR).exists() else ""
        raise UserError(f"run_dir {run_dir} is not empty: {resumable}name another")
    return config, run_dir, False


def _resumed(run_dir: Path, parsed: ParsedFlags) -> RunConfig:
    """The saved configuration, with the flags that a resumed run may change."""
    try:
        saved = json.loads(read_plain(run_dir / CONFIG_FILE))
        sections = {name: section() for name, section in SECTIONS.items()} | read_sections(SECTIONS, saved)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--resume {run_dir} is no run of agents.pretrain: {error}") from None
    for name in sorted(given_once(SECTIONS, saved) - parsed.given):
        print(f"this run had --{name}, which is not stored: it does nothing now unless it is given again")
    differing = []
    for name in sorted(parsed.given):
        section = OWNERS[name]
        new, old = getattr(parsed.configs[section], name), getattr(sections[section], name)
        if new != old and name not in CHANGEABLE:
            differing.append(f"--{name} {new} (it has {old})")
        sections[section] = dataclasses.replace(sections[section], **{name: new})
    if differing:
        raise UserError(f"this differs from the run to resume: {', '.join(differing)}; leave out what differs")
    return RunConfig(**sections)


@explains_errors
def main() -> int:
    """Entry of the command; returns the exit code."""
    text = (__doc__ or "").partition("\n")[0]
    parsed = parse_flags(
        SECTIONS, description=text, epilog=EPILOG, extra=_add_run_flags, prog="python -m agents.pretrain"
    )
    with ExitStack() as held:  # the run's lock
        return _run(parsed, held)


def _run(parsed: ParsedFlags, held: ExitStack) -> int:
    lock: RunLock | None = None
    config, run_dir, resume = choose_run(parsed)
    check_launch(config.launch)
    resolved = resolve(config.launch)
    if os.environ.get("RANK", "0") == "0":
        task = config.prepare_task()
        print(resolved.message)
        print(task.describe())
        run_dir = run_dir or fresh_directory(RUNS)
        lock = held.enter_context((hold if resume else hold_new)(run_dir / CONFIG_FILE))
        print(f"run directory: {run_dir}", flush=True)
        save_config(config, run_dir)
    args = (config, resolved, run_dir or RUNS, resume, lock)
    code = launch(run_rank, args, resolved.num_ranks, max_restarts=config.launch.max_restarts, run_dir=run_dir)
    if code and run_dir and not resume and lock and leads_to(lock.path, lock.file):  # else it is no longer ours
        discard_unstarted(run_dir)
    return code
