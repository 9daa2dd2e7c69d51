"""Loggers of metrics: TensorBoard, Weights & Biases, MLflow.

TensorBoard is always written. `--loggers` names the others, which are imported only then.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line
from rl_dist.files import path_to_write, read_plain, write_whole

logger = logging.getLogger(__name__)
NO_SCALARS = ("iteration", "global_step", "rank", "epoch")  # places on the axis
PROJECT = "clstm-ppo"  # name at Weights & Biases and MLflow, unless their variables give another
Settings = Mapping[str, Mapping[str, Any]]  # by section and name


class Board:
    """TensorBoard's record of a folder."""

    def __init__(self, folder: str | Path, *, purge_step: int | None) -> None:
        """Open a new event file; see `MetricsWriter`."""
        # start-up: 1,000 ms, on the main process only
        from torch.utils.tensorboard import SummaryWriter

        # it writes in a thread, every 10 s
        self.board: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)  # type: ignore[no-untyped-call]
        self.flush = self.board.flush
        self.close = self.board.close

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add scalars at a step."""
        for tag, value in scalars.items():
            self.board.add_scalar(tag, value, step)


class WandbLogger:
    """A run of Weights & Biases; variables such as WANDB_MODE are obeyed."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.resolve().name,
            id=_kept_id(run_dir, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",  # a resumed training stays one run
            dir=str(run_dir),
            config=_flat(settings),
        )

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log scalars; the service drops steps that were logged before a resume."""
        self.run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Upload or store what is left."""
        self.run.finish()


class MlflowLogger:
    """A run of MLflow: at MLFLOW_TRACKING_URI, else in RUN_DIR/mlflow.db."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir.resolve()}/mlflow.db")
        self.client, self.metric = MlflowClient(tracking_uri=place), Metric
        self.run_id = _kept_id(run_dir, "mlflow", lambda: self._begin(run_dir, settings))
        self.client.update_run(self.run_id, status="RUNNING")

    def _begin(self, run_dir: Path, settings: Settings) -> str:
        """Create the run, with the settings as parameters; return its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        run = self.client.create_run(experiment, run_name=run_dir.resolve().name)
        for key, value in _flat(settings).items():
            self.client.log_param(run.info.run_id, key, str(value)[:500])
        return str(run.info.run_id)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log scalars in one call."""
        metrics = [self.metric(name, value, 0, step) for name, value in scalars.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run_id)


LOGGERS: dict[str, Callable[[Path, Settings], Any]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


class Guarded:
    """A logger that ends with a warning when it fails: training continues."""

    def __init__(self, name: str, opened: Any) -> None:
        """Guard an object with `write(scalars, step)`, `close` and perhaps `flush`."""
        self.name, self.logger = name, opened

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """Log the numbers of a record that holds no NaN and no infinity."""
        self._call("write", dict(_scalars_of(record)), step)

    def flush(self) -> None:
        """Put all that was written on disk, so that it survives this process."""
        self._call("flush")

    def close(self) -> None:
        """Finish the record."""
        self._call("close")
        self.logger = None

    def _call(self, method: str, *args: Any) -> None:
        try:
            if call := getattr(self.logger, method, None):
                call(*args)
        except FOREIGN_ERRORS as error:  # a disk, a network, foreign code: none may end a training
            self.logger = None  # it has ended
            reason = (error.strerror if isinstance(error, OSError) else "") or one_line(error)
            logger.warning("%s's record ends here: %s", self.name, reason)


def named_loggers(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in LOGGERS]:
        raise ValueError(f"loggers {unknown[0]} is unknown: name some of {', '.join(LOGGERS)}")
    return names


def open_logger(name: str, run_dir: Path, settings: Settings) -> Guarded:
    """Open a logger by name."""
    try:
        return Guarded(name, LOGGERS[name](run_dir, settings))
    except ImportError as error:
        raise UserError(f"--loggers {name}: {error}; pip install 'clstm-ppo[{name}]'") from None
    except FOREIGN_ERRORS as error:  # no login, no network, ...
        raise UserError(f"--loggers {name}: {one_line(error)}", exit_code=1) from error


def _scalars_of(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield tags and values of a record's numbers; rank N's stand below rank_N/."""
    for key, value in record.items():
        if isinstance(value, bool | int | float) and key not in NO_SCALARS:
            yield prefix + key, float(value)
    for rank in record.get("ranks", ()):
        yield from _scalars_of(rank, f"rank_{rank.get('rank')}/")


def _flat(settings: Settings) -> dict[str, Any]:
    """Return settings as section.name."""
    return {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in values.items()
    }


def _kept_id(run_dir: Path, name: str, make: Callable[[], str]) -> str:
    """Return the id of this run at a service; made at first, then read from a file."""
    path = path_to_write(run_dir, f"{name}_run_id")
    if not path.exists():
        write_whole(path, make())
    return read_plain(path).decode().strip()
