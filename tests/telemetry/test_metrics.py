"""The files, logger records and progress lines that the main process writes."""

import logging
import math
import time

import numpy as np
import pytest
import torch
from tensorboard_readers import scalars
from train_runs import records

from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir
from rl_dist.telemetry import loggers
from rl_dist.telemetry.loggers import (
    GuardedLogger,
    check_installed,
    named_loggers,
    open_logger,
)
from rl_dist.telemetry.metrics import MetricsWriter, close_logging, setup_logging

CONFIG = {"train": {"seed": 3, "loggers": ""}, "ppo": {"gamma": 0.9, "shape": [1, 2]}}


def record(iteration, **values):
    return {"iteration": iteration, "global_step": 100 * iteration, **values}


def write(run_dir, *lines, **options):
    """Write `lines` with a MetricsWriter; return the records in the file."""
    writer = MetricsWriter(RunDir(run_dir), 10, "steps", **options)
    for line in lines:
        writer.write(line, done=line["iteration"])
        # Each record is written immediately.
        assert records(run_dir)[-1]["iteration"] == line["iteration"]
    for _ in range(2):
        writer.close()
    return records(run_dir)


def test_records_and_scalars_hold_finite_numbers_by_global_step_and_rank(tmp_path):
    values = {"a": math.nan, "b": torch.tensor(2.5), "c": np.float32(1.5), "d": [math.inf, None]}
    ranks = [{"rank": 0, "x": 1.0}, {"rank": 1, "x": None}]
    found = write(tmp_path, record(1, **values, ranks=ranks))
    assert found == [record(1, a=None, b=2.5, c=1.5, d=[None, None], ranks=ranks)]
    assert scalars(tmp_path) == {"b": [(100, 2.5)], "c": [(100, 1.5)], "rank_0/x": [(100, 1.0)]}


def test_a_resumed_run_continues_its_files_without_duplicates(tmp_path):
    run = RunDir(tmp_path)
    run.cut_records(5)  # does nothing, because there are no records yet
    write(tmp_path, *(record(n, x=float(n)) for n in (1, 2, 3)))
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 4, "glob')  # a line that a kill has cut off
    assert [line["iteration"] for line in run.records(last=2)] == [2, 3]
    run.cut_records(2)
    # TensorBoard reads event files by name: second, host, process, then a count in which 10 < 9.
    time.sleep(1)
    found = write(tmp_path, record(3, x=30.0), start=2, purge_step=201)
    assert [(line["iteration"], line["x"]) for line in found] == [(1, 1), (2, 2), (3, 30)]
    assert sorted(scalars(tmp_path)["x"]) == [(100, 1.0), (200, 2.0), (300, 30.0)]


def test_logs_have_level_and_rank_and_the_console_shows_warnings_of_the_main_process(
    tmp_path, capsys
):
    try:
        for rank in (0, 1):
            setup_logging(tmp_path, rank)
            logging.getLogger("some.module").info("a detail of %d", rank)
            logging.getLogger("some.module").warning("a warning of %d", rank)
            detail, warning = (tmp_path / f"logs/rank_{rank}.log").read_text().splitlines()
            assert f"INFO rank {rank} some.module" in detail and f"WARNING rank {rank} " in warning
    finally:
        close_logging()
    assert capsys.readouterr().err == "warning: a warning of 0\n"


# ---- loggers


def test_a_failing_logger_is_stopped_with_one_warning(caplog):
    def fail(*_):
        raise SystemExit("no network")

    guarded = GuardedLogger("wandb", fail, fail)
    for iteration in (1, 2):
        guarded.write(record(iteration, x=1.0), 100)
    guarded.close()
    (message,) = caplog.messages
    assert "wandb" in message and "no network" in message


def test_an_unknown_or_missing_logger_is_a_one_line_error(monkeypatch):
    with pytest.raises(ValueError, match="loggers neptune .*wandb"):
        named_loggers("wandb, neptune")
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'clstm-ppo\[wandb\]'"):
        check_installed("wandb")


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_logging_service_stores_its_run_in_the_run_directory_and_continues_it(
    name, tmp_path, monkeypatch
):
    service = pytest.importorskip(name, reason=f"the extra {name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for iteration in (1, 2):  # the second writer continues the run of the first
        line = record(iteration, ranks=[{"rank": 0, "time/sps": 5.0}], x=7.0)
        write(tmp_path, line, loggers=[open_logger(name, tmp_path, CONFIG)])
    run_id = (tmp_path / f"{name}_run_id").read_text()
    if name == "wandb":
        assert list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
        return
    client = service.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["train.seed"]) == ("FINISHED", "3")
    history = client.get_metric_history(run_id, "x")
    assert [(m.step, m.value) for m in history] == [(100, 7.0), (200, 7.0)]
    assert run.data.metrics["rank_0/time/sps"] == 5.0


# ---- progress


@pytest.mark.parametrize("on_terminal", [False, True])
def test_progress_is_a_few_lines_or_a_bar(tmp_path, capsys, monkeypatch, on_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal, raising=False)
    writer = MetricsWriter(RunDir(tmp_path), 96, "episodes")
    for iteration in range(1, 12):
        line = record(iteration, **{"time/sps": 1000.0 * iteration})
        writer.write(line, done=9 * iteration)
    writer.close()
    # 99 episodes have ended, but the progress never shows more than the budget, 96.
    shown = capsys.readouterr().err
    assert "time/sps=11,000" in shown and " 96/96 " in shown
    assert (shown.count("\r") >= 11) == on_terminal
    assert on_terminal or len(shown.splitlines()) == 2
