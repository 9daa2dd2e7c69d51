"""Pre-train the feature LSTM, before PPO, to predict the next days of a market.

    python -m agents.pretrain [--data FILE] [--num_gpus 2 --device cpu] ...
    python train_distributed.py --pretrained RUN_DIR

After every day of a window, the LSTM predicts for each stock the sign of the next day's return and
the volatility of the next days. The LSTM is trained on the training span; training stops when the
loss on the validation span no longer improves. The test span is never used.
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from agents.learner.network.inputs import Normalizer
from agents.learner.policy import Policy
from agents.learner.settings import PolicyConfig
from agents.run.saved import FEATURES
from envs.task import TaskSettings
from envs.trading.config import (
    DataConfig,
    Observation,
    SimulatedMarketConfig,
    TradingConfig,
    data_digest,
)
from envs.trading.features import market_tables, portfolio_columns
from envs.trading.market_data import Market, Span
from envs.trading.task import TradingTask
from envs.vector.layout import Layout
from rl_dist.errors import UserError, explains_errors, outlive_readers
from rl_dist.files import is_first
from rl_dist.flags import Field, Text, configuration, parse_flags, read_sections, saved_form
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve_launch
from rl_dist.launch.ranks import launch, restart_count
from rl_dist.process_group.collectives import all_gather_json, check_settings
from rl_dist.process_group.world import open_world
from rl_dist.run_dir import RunDir
from rl_dist.strategies.adam import EagerAdam
from rl_dist.strategies.precision import cast_copy
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import FitConfig, fit
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import close_logging, setup_logging

RUNS = Path("runs", "pretrain")  # train_distributed.py --resume auto ignores runs in this folder
VOLATILITY_DAYS = 5  # number of following days whose volatility is predicted
VOLATILITY_WEIGHT = 0.5  # weight of the volatility loss; the weight of the sign loss is 1
SMALLEST_MOVE = 1e-4  # added to the daily volatility, so that its logarithm is finite
EPILOG = """examples:
  python -m agents.pretrain                                    on the simulated markets
  python -m agents.pretrain --num_gpus 2 --device cpu          the same with two CPU ranks
  python -m agents.pretrain --data prices.csv --test_start 2016-01-04
  python train_distributed.py --pretrained runs/pretrain/2026-01-31_12-00-00
exit codes: 0 done, 1 failed, 2 bad usage; stopped: 130 (INT), 143 (TERM), 138 (USR1), 129 (HUP)"""


@configuration
class RunFlags:
    """Run directory of a pre-training run."""

    run_dir: Text = ""
    """Directory to write to; by default, runs/pretrain/DATE_TIME."""
    resume: Text = ""
    """Continue the pre-training run in this directory."""


@configuration
class PretrainConfig:
    """Size, inputs and training settings of the feature LSTM."""

    hidden_size: int = Field(128, ge=1, le=8192)
    """Width of the feature LSTM; PPO training must use the same --hidden_size."""
    observation: Observation = "relative"
    """Type of observations; PPO training must use the same --observation."""
    window: int = Field(60, ge=2, le=10**5)
    """Number of days in a training sequence, which begins with a zero LSTM state."""
    batch_size: int = Field(64, ge=1, le=10**7)
    """Number of sequences in a batch, over all ranks."""
    learning_rate: float = Field(1e-3, ge=0, le=10)
    """Step size of Adam."""


@dataclass(frozen=True, kw_only=True)
class PretrainRunConfig:
    """All settings of a pre-training run, as saved in config.json."""

    launch: LaunchConfig = LaunchConfig()
    fit: FitConfig = FitConfig(epochs=20, patience=3, max_grad_norm=1.0)
    pretrain: PretrainConfig = PretrainConfig()
    data: DataConfig = DataConfig()
    market: SimulatedMarketConfig = SimulatedMarketConfig()

    def prepare_task(self) -> TradingTask:
        """Return the trading task, with the same markets and spans as in PPO training."""
        trading = TradingConfig(observation=self.pretrain.observation)
        sections = {"data": self.data, "market": self.market, "trading": trading}
        task = TradingTask(TaskSettings(sections=sections))
        if "valid" not in task.spans:
            raise UserError("there is no validation span: give --valid_start and --valid_end")
        return task


SECTIONS: dict = vars(PretrainRunConfig())


# ---- windows of days, and targets


def make_windows(
    markets: Sequence[Market],
    span: Span,
    config: TradingConfig,
    *,
    days: int,
    stride: int,
    seed: int,
    scale: tuple[float, float] | None = None,
) -> tuple[TensorDataset, tuple[float, float]]:
    """Return windows of consecutive days, with targets for each day of a window.

    Inputs [days, F] are observations as the trading environment returns them. They contain a random
    portfolio that stays the same for the whole window, so that the LSTM's features cannot depend on
    the portfolio. Targets [days, 2, n] are two numbers per day for each of n stocks. The first is
    1 if the next day's return is positive, else 0. The second is the standardised log volatility of
    the next VOLATILITY_DAYS days. The windows and the days that their targets describe lie within
    the span.

    Args:
        days: length of a window.
        stride: number of days between the starts of consecutive windows.
        scale: mean and standard deviation used to standardise the log volatility; None: compute
            them from this span.

    Returns:
        The windows, and the mean and standard deviation used to standardise the log volatility.
    """
    num_days = span.last - span.first + 1
    if num_days < days + VOLATILITY_DAYS:
        raise UserError(
            f"window {days} and the {VOLATILITY_DAYS} days after it do not fit into a span of "
            f"{num_days} days: make --window smaller or the span longer"
        )
    # `discount` affects only the gains in `prices`, which are not used here.
    features, prices, _ = market_tables(markets, span, config, train_span=span, discount=0.0)
    close = prices[:, 0].unflatten(0, (len(markets), num_days))  # [M, D, n]
    features = features.unflatten(0, (len(markets), num_days))  # [M, D, F]
    targets = _targets(close)  # [M, D - VOLATILITY_DAYS, 2, n]
    volatility = targets[:, :, 1]
    mean, deviation = scale or (float(volatility.mean()), float(volatility.std()))
    volatility.sub_(mean).div_(deviation)

    def windows(values: Tensor) -> Tensor:
        """Cut tables [M, D, ...] of days into windows [N, days, ...]."""
        # The last days have no targets.
        parts = values[:, : num_days - VOLATILITY_DAYS].unfold(1, days, stride)  # [M, W, ..., days]
        return parts.movedim(-1, 2).flatten(0, 1).contiguous()

    inputs = windows(features)
    cash, holdings = _portfolios(windows(close)[:, 0], config, seed)
    inputs[:, :, 0] = cash
    inputs[:, :, portfolio_columns(config.observation, close.shape[2])] = holdings.unsqueeze(1)
    return TensorDataset(inputs, windows(targets)), (mean, deviation)


def _targets(close: Tensor) -> Tensor:
    """Compute targets [M, D - VOLATILITY_DAYS, 2, n]; the last days have no targets."""
    log_returns = close.log().diff(dim=1)  # [M, D-1, n], from each day to the next
    future = log_returns.unfold(1, VOLATILITY_DAYS, 1)  # [M, D-VOLATILITY_DAYS, n, VOLATILITY_DAYS]
    volatility = (future.square().mean(-1).sqrt() + SMALLEST_MOVE).log()
    return torch.stack([(future[..., 0] > 0).to(volatility.dtype), volatility], dim=2).float()


def _portfolios(close: Tensor, config: TradingConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Draw random cash [N, 1] and holdings [N, n], in the units of observations."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.empty(len(close), close.shape[1] + 1).exponential_(generator=generator)
    shares /= shares.sum(1, keepdim=True)  # now uniform over all possible portfolios
    if config.observation == "relative":
        return shares[:, :1], shares[:, 1:]
    usd = shares * config.initial_cash_usd
    return usd[:, :1], (usd[:, 1:] / close).floor().float()


def windows_of(config: PretrainRunConfig, task: TradingTask) -> tuple[TensorDataset, TensorDataset]:
    """Return overlapping training windows and non-overlapping validation windows."""
    days = config.pretrain.window
    make = partial(make_windows, config=task.trading, days=days, seed=config.fit.seed)
    train, scale = make(task.markets("train"), task.spans["train"], stride=max(1, days // 2))
    return train, make(task.markets("valid"), task.spans["valid"], stride=days, scale=scale)[0]


# ---- module


class FeatureTraining(nn.Module):
    """The policy's feature LSTM with a head that predicts the next days.

    The module maps observations [N, days, F], which it normalises, to predictions [N, days, 2, n]
    for every day and each of n stocks: the logit of the probability that the stock rises on the
    next day, and the standardised log volatility of the next VOLATILITY_DAYS days.
    """

    low_precision: torch.dtype | None = None

    def __init__(self, config: PretrainRunConfig, inputs: Tensor, num_stocks: int) -> None:
        """Take the feature LSTM of a new policy; compute the normaliser from `inputs`."""
        super().__init__()
        torch.manual_seed(config.fit.seed)
        policy_config = PolicyConfig(hidden_size=config.pretrain.hidden_size)
        layout = Layout.vector(inputs.shape[2])
        policy = Policy(policy_config, layout, spaces.Box(-1.0, 1.0, (num_stocks,)))
        self.feature_core = policy.feature_core
        self.feature_mlp = policy.feature_mlp
        self.head = nn.Linear(policy_config.hidden_size, 2 * num_stocks)
        self.to(config.launch.dtype)  # must precede the next line: the normaliser stays float64
        self.normalizer = Normalizer(policy.num_obs)

        # The first pass computes the mean of the observations. The second pass sums deviations
        # from this mean, which causes smaller rounding errors.
        moments = self.normalizer.moments
        for _ in range(2):
            moments.count.zero_()
            for chunk in inputs.split(1024):
                moments.merge(moments.sums(chunk))

    def forward(self, obs: Tensor) -> Tensor:
        """Return the predictions [N, days, 2, n] that the class docstring describes."""
        inputs = self.normalizer(obs).to(self.head.weight.dtype).transpose(0, 1)
        core = cast_copy(self.feature_core, self.low_precision)
        mlp = cast_copy(self.feature_mlp, self.low_precision)
        state = inputs.new_zeros(core.num_states, inputs.shape[1], core.hidden_size)
        features, _ = mlp(core(inputs.contiguous(), state)[0], state)
        return self.head(features.to(inputs.dtype)).transpose(0, 1).unflatten(2, (2, -1))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of signs plus the weighted MSE of log volatilities.

    Outputs and targets have shape [N, days, 2, n].
    """
    targets = targets.to(outputs.dtype)
    signs = functional.binary_cross_entropy_with_logits(outputs[:, :, 0], targets[:, :, 0])
    return signs + VOLATILITY_WEIGHT * functional.mse_loss(outputs[:, :, 1], targets[:, :, 1])


def sign_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mask [N, days, n] that is True where the predicted sign is correct."""
    return (outputs[:, :, 0] > 0) == (targets[:, :, 0] > 0.5)


# ---- run


def run_rank(config: PretrainRunConfig, resolved: ResolvedLaunch, run: RunDir, resume: bool) -> int:
    """Pre-train on this rank; return the exit code."""
    world = open_world(
        resolved.device_type,
        gpu_ids=resolved.gpu_ids,
        threads=resolved.threads,
        backend=resolved.backend,
    )
    check_settings({}, world)
    # Under torchrun, ranks may have chosen different paths: use the path of rank 0.
    run_dir = Path(all_gather_json(str(run.path), world)[0])
    if world.is_main_process:
        events.configure(config.launch.on_event, run_dir)
    setup_logging(run_dir, world.rank)

    train, valid = windows_of(config, config.prepare_task())
    (inputs, _), targets = train.tensors, valid.tensors[1]
    strategy_config = replace(config.launch.strategy_config, device_ids=resolved.gpu_ids)
    strategy = Strategy(strategy_config, world)
    module = strategy.wrap(FeatureTraining(config, inputs, targets.shape[3]).to(world.device))
    loader = partial(DataLoader, batch_size=config.pretrain.batch_size)
    result = fit(
        module,
        loader(train, shuffle=True),
        EagerAdam(strategy.parameters, lr=config.pretrain.learning_rate),
        loss,
        strategy,
        validation=loader(valid),
        metrics={"sign_accuracy": sign_accuracy},
        config=config.fit,
        run_dir=run_dir,
        resume=resume or restart_count() > 0,
        extra={
            "kind": FEATURES,
            "num_obs": inputs.shape[2],
            "precision": config.launch.precision,
            **vars(config.pretrain),
            **vars(config.data) | {"data": config.data.data_digest or config.data.data},
            **vars(config.market),
        },
    )
    if not (result.signum or result.best_epoch):
        raise UserError("the validation loss was never finite: lower --learning_rate", exit_code=1)
    if world.is_main_process and not result.signum:
        best = result.history[result.best_epoch - 1]
        num_epochs = len(result.history)
        run.write_summary({"best_epoch": result.best_epoch, "epochs": num_epochs, "best": best})
        print(
            f"best epoch {result.best_epoch} of {num_epochs}: on the validation span, "
            f"{best['valid/sign_accuracy']:.1%} of the predicted return signs are correct\n"
            f"next: python train_distributed.py --pretrained {run_dir}",
            flush=True,
        )
    elif world.is_main_process:
        name = signal.Signals(result.signum).name
        print(f"stopped by {name} after epoch {result.epoch}: continue with --resume {run_dir}")
    return 128 + result.signum if result.signum else 0


@explains_errors
def main() -> int:
    """Run the command; return the exit code."""
    sections = {"run": RunFlags(), **SECTIONS}
    parse = partial(
        parse_flags,
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        prog="python -m agents.pretrain",
    )
    configs = parse(sections).configs
    flags = configs.pop("run")
    run = RunDir(flags.resume or flags.run_dir or RUNS)
    # A resumed run uses its saved settings as defaults. Later, `fit` refuses some changes.
    if flags.resume:
        configs = parse(sections | read_sections(SECTIONS, run.config())).configs
        configs.pop("run")
    config = PretrainRunConfig(**configs)
    config = replace(config, data=replace(config.data, data_digest=data_digest(config.data)))
    chosen, resolved, note = resolve_launch(config.launch)
    config = replace(config, launch=chosen)
    with ExitStack() as cleanup:
        if is_first():
            print(f"{note or resolved.message}\n{config.prepare_task().describe()}")
            if not (flags.resume or flags.run_dir):
                run = RunDir.fresh(RUNS)
            cleanup.enter_context(run.hold() if flags.resume else run.hold_new())
            print(f"run directory: {run.path}", flush=True)
            run.write_config(saved_form(config))
        code = 1
        try:
            code = launch(
                run_rank,
                (config, resolved, run, bool(flags.resume)),
                resolved.num_ranks,
                max_restarts=config.launch.max_restarts,
                directory=run,
                threads=resolved.threads,
            )
        finally:
            if code and not flags.resume:
                close_logging()
                run.discard_unstarted(code)
        return code


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
