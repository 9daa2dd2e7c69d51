"""Log metrics to TensorBoard, Weights & Biases and MLflow.

TensorBoard files are always written. The other loggers are imported only if the flag `--loggers`
selects them.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line
from rl_dist.files import Record, path_to_write, read_plain, write_whole

logger = logging.getLogger(__name__)
# fields that say when and where a record was measured; loggers receive no scalars for them
NO_SCALARS = ("iteration", "global_step", "rank", "epoch")
# default name of the project; Weights & Biases and MLflow have environment variables to change it
PROJECT = "clstm-ppo"
Settings = Mapping[str, Mapping[str, object]]  # values by section and name
Write = Callable[[dict[str, float], int], object]  # arguments: scalars by name, and a step
Finish = Callable[[], object]


@dataclass
class GuardedLogger:
    """A logger that does nothing after its first error, for which it logs a warning."""

    name: str
    _write: Write
    _finish: Finish
    _flush: Finish = lambda: None
    _has_ended: bool = False

    def write(self, record: Record, step: int) -> None:
        """Log all numbers in a record; they must be finite."""
        self._call(self._write, dict(_scalars_of(record)), step)

    def flush(self) -> None:
        """Flush everything written so far to disk."""
        self._call(self._flush)

    def close(self) -> None:
        """Finish the log; a second call does nothing."""
        self._call(self._finish)
        self._has_ended = True

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._has_ended:
            return
        try:
            function(*args)
        # an error of the disk, the network or a library must not stop training
        except BaseException as error:
            self._has_ended = True
            logger.warning("%s failed and is no longer used: %s", self.name, one_line(error))


def open_tensorboard(folder: Path, *, purge_step: int | None) -> GuardedLogger:
    """Open a new TensorBoard event file in a folder.

    Args:
        purge_step: TensorBoard hides the values of this and later steps in earlier event files;
            None: hide nothing.
    """
    # import here, because it takes 1 s and only the main process needs it
    from torch.utils.tensorboard import SummaryWriter

    # a thread of SummaryWriter writes to the file every 10 s
    board: Any = SummaryWriter(folder, purge_step=purge_step, flush_secs=10)  # type: ignore[no-untyped-call]

    def write(scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            board.add_scalar(tag, value, step)

    return GuardedLogger("TensorBoard", write, board.close, board.flush)


def open_wandb(run_dir: Path, settings: Settings) -> tuple[Write, Finish]:
    """Open a Weights & Biases run; environment variables such as WANDB_MODE configure it."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_dir.resolve().name,
        id=_kept_id(run_dir, "wandb", lambda: secrets.token_hex(4)),
        resume="allow",  # a resumed training run continues its W&B run
        dir=str(run_dir),
        config=settings,
    )
    # After a resume, W&B ignores steps that it has already received.
    return lambda scalars, step: run.log(scalars, step=step), run.finish


def open_mlflow(run_dir: Path, settings: Settings) -> tuple[Write, Finish]:
    """Open an MLflow run at MLFLOW_TRACKING_URI, or by default in RUN_DIR/mlflow.db."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir.resolve()}/mlflow.db")
    client = MlflowClient(tracking_uri=uri)

    def begin() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else client.create_experiment(name)
        run = client.create_run(experiment, run_name=run_dir.resolve().name)
        for section, values in settings.items():
            for key, value in values.items():
                client.log_param(run.info.run_id, f"{section}.{key}", value)
        return str(run.info.run_id)

    def write(scalars: dict[str, float], step: int) -> None:
        metrics = [Metric(name, value, 0, step) for name, value in scalars.items()]
        client.log_batch(run_id, metrics=metrics)

    run_id = _kept_id(run_dir, "mlflow", begin)
    return write, lambda: client.set_terminated(run_id)


LOGGERS = {"wandb": open_wandb, "mlflow": open_mlflow}


def named_loggers(text: str) -> list[str]:
    """Split a comma-separated list of loggers; raise ValueError if a logger is unknown."""
    names = text.replace(",", " ").split()
    if unknown := [name for name in names if name not in LOGGERS]:
        raise ValueError(f"loggers {unknown[0]} is unknown: choose from {', '.join(LOGGERS)}")
    return names


def check_installed(text: str) -> None:
    """Refuse a list of loggers if the package of a logger is not installed."""
    for name in named_loggers(text):
        if not find_spec(name):
            raise UserError(f"--loggers {name} needs pip install 'clstm-ppo[{name}]'")


def open_logger(name: str, run_dir: Path, settings: Settings) -> GuardedLogger:
    """Open the logger called `name`, and log the settings of the run with it."""
    try:
        return GuardedLogger(name, *LOGGERS[name](run_dir, settings))
    except FOREIGN_ERRORS as error:  # for example no login or no network
        raise UserError(f"--loggers {name}: {one_line(error)}", exit_code=1) from error


def _scalars_of(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield a tag and the value for each number; the tags of rank N begin with rank_N/."""
    for key, value in record.items():
        if isinstance(value, int | float) and key not in NO_SCALARS:
            yield prefix + key, float(value)
    for rank in record.get("ranks", ()):
        yield from _scalars_of(rank, f"rank_{rank.get('rank')}/")


def _kept_id(run_dir: Path, name: str, make: Callable[[], str]) -> str:
    """Return the id of this run at a logging service.

    The first call creates an id with `make` and saves the id in a file. Later calls, also those of
    a resumed run, read the file.
    """
    path = path_to_write(run_dir, f"{name}_run_id")
    if not path.exists():
        write_whole(path, make())
    return read_plain(path).decode().strip()
