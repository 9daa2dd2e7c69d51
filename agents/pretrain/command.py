"""Train the feature LSTM on market data, before PPO, to predict the next days.

    python -m agents.pretrain [--data FILE] [--num_gpus 2 --device cpu] ...
    python train_distributed.py --pretrained RUN_DIR

After every day of a window of days it predicts, for each stock, the sign of the next day's return
and the volatility of the next days. Trained on the training span, stopped by the validation span;
the test span is never looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from agents.config import with_digest
from agents.policy import Policy, PolicyConfig
from agents.pretrain.weights import KIND, FeatureTraining
from agents.pretrain.windows import MarketWindows
from agents.run.choice import check_unused, is_first
from agents.run.resumed import check_data, refuse_differences
from envs.trading.config import DataConfig, Observation, SimulatedMarketConfig, TradingConfig
from envs.trading.task import TradingTask, prepare_task
from rl_dist.errors import UserError, explains_errors
from rl_dist.files import read_plain
from rl_dist.flags import (
    Field,
    ParsedFlags,
    configuration,
    parse_flags,
    read_sections,
    saved_form,
)
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.launch.ranks import launch, restart_count
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World, open_world
from rl_dist.run_dir import RunDir
from rl_dist.strategies.strategy import EagerAdam, Strategy
from rl_dist.supervised.fit import FitConfig, FitResult, fit
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import close_logging, setup_logging

RUNS = Path("runs", "pretrain")  # apart from those of PPO, of which --resume auto takes the newest
VOLATILITY_WEIGHT = 0.5  # in the loss, beside the sign
EPILOG = """examples:
  python -m agents.pretrain                                    on the simulated markets
  python -m agents.pretrain --num_gpus 2 --device cpu          the same with two CPU ranks
  python -m agents.pretrain --data prices.csv --test_start 2016-01-04
  python train_distributed.py --pretrained runs/pretrain/2026-01-31_12-00-00
exit codes: 0 done, 1 failed, 2 bad usage, stopped: 130 (INT), 143 (TERM), 138 (USR1), 129 (HUP)"""


@configuration
class PretrainConfig:
    """What the feature LSTM is, and what it is shown."""

    hidden_size: int = Field(128, ge=1, le=8192)
    """Width of the feature LSTM; training needs the same --hidden_size."""
    observation: Observation = "relative"
    """Form of the observations; training needs the same --observation."""
    window: int = Field(60, ge=2, le=10**5)
    """Length of a training sequence; the LSTM's state is zero at its start."""
    batch_size: int = Field(64, ge=1, le=10**7)
    """Sequences in a batch, total over all ranks."""
    learning_rate: float = Field(1e-3, ge=0, le=10)
    """Step size of Adam."""


@dataclass(frozen=True, kw_only=True)
class PretrainRunConfig:
    """Everything that defines a pre-training; config.json holds it."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    fit: FitConfig = FitConfig(epochs=20, patience=3, max_grad_norm=1.0)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    market: SimulatedMarketConfig = field(default_factory=SimulatedMarketConfig)

    def to_dict(self) -> dict[str, Any]:
        """Return what files hold of it."""
        return saved_form(self)

    def check_launch(self) -> None:
        """Refuse strategies that are measured, fall back or cut the cascade."""
        refused = {"strategy": "auto", "fallback": True, "hybrid_form": "pipeline"}
        for name, value in refused.items():
            if getattr(self.launch, name) == value:
                flag = f"--{name}" + f" {value}" * (value is not True)
                raise UserError(f"{flag} is for train_distributed.py only: leave it out")

    def prepare_task(self) -> TradingTask:
        """Return the markets and their spans, as PPO sees them."""
        trading = TradingConfig(observation=self.pretrain.observation)
        task = prepare_task(self.data, self.market, trading)
        if task.spans.valid is None:
            raise UserError("there is no validation span: give --valid_start and --valid_end")
        return task


SECTIONS: dict[str, Any] = vars(PretrainRunConfig())
OWNERS = {name: heading for heading, section in SECTIONS.items() for name in vars(section)}
# What a resumed run may change: how long, and where it runs.
CHANGEABLE = {"epochs", "patience", "keep_checkpoints", "progress"} | {
    item.name for item in dataclasses.fields(LaunchConfig) if item.name != "precision"
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the signs plus weighted square error of the volatilities.

    Outputs and targets: [N, days, 2, n].
    """
    targets = targets.to(outputs.dtype)
    signs = functional.binary_cross_entropy_with_logits(outputs[:, :, 0], targets[:, :, 0])
    return signs + VOLATILITY_WEIGHT * functional.mse_loss(outputs[:, :, 1], targets[:, :, 1])


def sign_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[N, days, n] bool: the sign was predicted."""
    return (outputs[:, :, 0] > 0) == (targets[:, :, 0] > 0.5)


def volatility_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Square errors of the standardised log volatilities [N, days, n]."""
    return (outputs[:, :, 1] - targets[:, :, 1]).square()


METRICS = {"sign_accuracy": sign_accuracy, "volatility_error": volatility_error}


def make_windows(
    config: PretrainRunConfig, task: TradingTask
) -> tuple[MarketWindows, MarketWindows]:
    """Overlapping windows to train on, and windows of every validation day once."""
    assert task.spans.valid is not None
    days = config.pretrain.window
    shared: dict[str, Any] = {"config": task.trading, "days": days, "seed": config.fit.seed}
    stride = max(1, days // 2)
    train = MarketWindows(task.markets("train"), task.spans.train, stride=stride, **shared)
    shared |= {"stride": days, "volatility_scale": train.volatility_scale}
    return train, MarketWindows(task.markets("valid"), task.spans.valid, **shared)


def make_module(config: PretrainRunConfig, windows: MarketWindows) -> FeatureTraining:
    """Return the feature LSTM as a fresh policy has it, and its head."""
    torch.manual_seed(config.fit.seed)
    shape = PolicyConfig(hidden_size=config.pretrain.hidden_size)
    policy = Policy(shape, windows.num_obs, spaces.Box(-1.0, 1.0, (windows.num_stocks,)))
    module = FeatureTraining(policy, windows.num_stocks)

    # statistics of all observations; once more around the mean: a large offset would cost digits
    moments = module.normalizer.moments
    for _ in range(2):
        moments.restart()
        for numbers in torch.arange(len(windows)).split(1024):
            moments.merge(moments.sums(windows.__getitems__(numbers.tolist())[0]))
    for name, part in module.named_children():
        if name != "normalizer":
            part.to(config.launch.dtype)
    return module


def run_fit(
    config: PretrainRunConfig,
    world: World,
    run_dir: Path,
    resume: bool,
    gpu_ids: tuple[int, ...] = (),
) -> tuple[FitResult, dict[str, Any]]:
    """Train on this rank; returns the result and a summary of the best epoch."""
    settings = config.pretrain
    train, valid = make_windows(config, config.prepare_task())
    strategy_config = dataclasses.replace(config.launch.strategy_config, device_ids=gpu_ids)
    strategy = Strategy(strategy_config, world)
    module: nn.Module = strategy.wrap(make_module(config, train).to(world.device))
    # windows make whole batches themselves
    loader: Any = partial(DataLoader, batch_size=settings.batch_size, collate_fn=lambda it: it)
    result = fit(
        module,
        loader(train, shuffle=True),
        EagerAdam(strategy.parameters, lr=settings.learning_rate),
        loss,
        strategy,
        validation=loader(valid),
        metrics=METRICS,
        config=config.fit,
        run_dir=run_dir,
        resume=resume,
        extra={
            "kind": KIND,
            "observation": settings.observation,
            "num_obs": train.num_obs,
            "hidden_size": settings.hidden_size,
        },
    )
    if not (result.best_epoch or result.signum):
        raise UserError("the validation loss was never finite: lower --learning_rate", exit_code=1)

    # beside the figures of always predicting the more frequent sign, and the mean volatility
    _, targets = valid.__getitems__(range(len(valid)))
    up = float(targets[:, :, 0].mean())
    volatility_error = float(targets[:, :, 1].square().mean())
    return result, {
        "best_epoch": result.best_epoch,
        "epochs": len(result.history),
        "best": result.history[result.best_epoch - 1] if result.best_epoch else {},
        "guessed": {"sign_accuracy": max(up, 1.0 - up), "volatility_error": volatility_error},
    }


def run_rank(
    config: PretrainRunConfig,
    resolved: ResolvedLaunch,
    run_dir: Path,
    resume: bool,
    lock: RunDir | None,
) -> int:
    """Pre-train on this rank, which keeps the lock; return the exit code."""
    world = open_world(resolved.device_type, gpu_ids=resolved.gpu_ids, threads=resolved.threads)
    run_dir = Path(all_gather_json(str(run_dir), world)[0])  # torchrun's ranks may differ
    if world.is_main_process:
        events.configure(config.launch.on_event, run_dir)
    setup_logging(run_dir, world.rank)
    resume = resume or restart_count() > 0
    result, summary = run_fit(config, world, run_dir, resume, resolved.gpu_ids)
    if world.is_main_process and result.signum:
        saved = f"go on with --resume {run_dir}" if result.history else "no epoch had ended"
        print(f"stopped by {signal.Signals(result.signum).name}; {saved}")
    elif world.is_main_process:
        RunDir(run_dir).write_summary(summary)
        best, guessed = summary["best"], summary["guessed"]
        print(f"best epoch {summary['best_epoch']} of {summary['epochs']}, on the validation span:")
        for name in METRICS:
            print(f"  {name} {best[f'valid/{name}']:.3f} (guessing: {guessed[name]:.3f})")
        print(f"next: python train_distributed.py --pretrained {run_dir}", flush=True)
    return 128 + result.signum if result.signum else 0


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    where = f"where to write (default: {RUNS}/DATE_TIME)"
    group.add_argument("--run_dir", default="", metavar="DIR", help=where)
    group.add_argument("--resume", default="", metavar="DIR", help="go on with this pre-training")


def choose_run(parsed: ParsedFlags) -> tuple[PretrainRunConfig, Path | None]:
    """Return the configuration, and the run directory if one is named."""
    resume, named = parsed.extra.resume, parsed.extra.run_dir
    if resume and named:
        raise UserError(f"--run_dir does nothing with --resume {resume}: leave it out")
    if resume:
        return _resumed(Path(resume), parsed), Path(resume)
    run_dir = Path(named) if named else None
    if run_dir and is_first():
        check_unused(run_dir)
    sections = parsed.configs | {"data": with_digest(parsed.configs["data"])}
    return PretrainRunConfig(**sections), run_dir


def _resumed(run_dir: Path, parsed: ParsedFlags) -> PretrainRunConfig:
    """The saved configuration, with the flags that a resumed run may change."""
    try:
        saved = json.loads(read_plain(RunDir(run_dir).config_path))
        sections = vars(PretrainRunConfig(**read_sections(SECTIONS, saved))).copy()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--resume {run_dir} is no run of agents.pretrain: {error}") from None
    check_data(sections["data"], "begin another pre-training")
    differing = []
    for name in parsed.given:
        section = OWNERS[name]
        new, old = (getattr(of[section], name) for of in (parsed.configs, sections))
        if new != old and name not in CHANGEABLE:
            differing.append(f"--{name} {new} (it has {old})")
        sections[section] = dataclasses.replace(sections[section], **{name: new})
    refuse_differences(differing, "omit what differs, or start a fresh run")
    return PretrainRunConfig(**sections)


@explains_errors
def main() -> int:
    """Entry of the command; returns the exit code."""
    text = (__doc__ or "").partition("\n")[0]
    parsed = parse_flags(
        SECTIONS,
        description=text,
        epilog=EPILOG,
        extra=_add_run_flags,
        prog="python -m agents.pretrain",
    )
    config, run_dir = choose_run(parsed)
    resume = bool(parsed.extra.resume)
    config.check_launch()
    resolved = resolve(config.launch)
    with ExitStack() as held:
        lock: RunDir | None = None
        if is_first():
            task = config.prepare_task()
            print(resolved.message)
            print(task.describe())
            run_dir = run_dir or RunDir.fresh(RUNS).path
            lock = RunDir(run_dir)
            held.enter_context(lock.hold() if resume else lock.hold_new())
            print(f"run directory: {run_dir}", flush=True)
            RunDir(run_dir).write_config(config.to_dict())
        args = (config, resolved, run_dir or RUNS, resume, lock)
        restarts, threads = config.launch.max_restarts, resolved.threads
        options: dict[str, Any] = {"max_restarts": restarts, "threads": threads}
        code = launch(run_rank, args, resolved.num_ranks, run_dir=run_dir, **options)

        # a new run that failed at once leaves its logs at most, not in a folder that another took
        if code and not resume and lock and lock.is_in_place():
            close_logging()
            lock.discard_unstarted(code)
        return code
