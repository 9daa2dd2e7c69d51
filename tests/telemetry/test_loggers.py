"""What TensorBoard, Weights & Biases and MLflow get of a training."""

import json
import logging

import pytest
from test_rl_dist_metrics import record, writer_of

from rl_dist.errors import UserError
from rl_dist.telemetry import loggers
from rl_dist.telemetry.loggers import Guarded, named_loggers

CONFIG = {"train": {"seed": 3, "loggers": ""}, "ppo": {"gamma": 0.9, "shape": [1, 2]}}


def test_a_logger_that_fails_ends_with_one_warning_and_the_others_go_on(caplog):
    class Failing:
        def write(self, scalars, step):
            raise ConnectionError("no network")

    guarded = Guarded("wandb", Failing())
    with caplog.at_level(logging.WARNING):
        guarded.write(record(1, x=1.0), 100)
        guarded.write(record(2, x=1.0), 200)
        guarded.close()
    assert [r.message for r in caplog.records] == [
        "wandb's record ends here: ConnectionError: no network"
    ]


def test_an_unknown_or_missing_logger_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="loggers neptune .*wandb"):
        named_loggers("wandb, neptune")
    monkeypatch.setitem(loggers.LOGGERS, "wandb", lambda *args: __import__("no_such_package"))
    with pytest.raises(UserError, match=r"pip install 'clstm-ppo\[wandb\]'"):
        writer_of(tmp_path, loggers=["wandb"])


def test_mlflow_keeps_settings_and_metrics_in_the_run_directory_and_goes_on(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    for iteration in (1, 2):  # the second writer goes on
        writer = writer_of(tmp_path, loggers=["mlflow"], config=CONFIG, start=iteration - 1)
        ranks = [{"rank": 0, "time/sps": 5.0}]
        writer.write(record(iteration, ranks=ranks, **{"episode/return": 7.0}), done=iteration)
        writer.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name(loggers.PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params["train.seed"]) == ("FINISHED", "3")
    history = client.get_metric_history(run.info.run_id, "episode/return")
    assert [(m.step, m.value) for m in history] == [(100, 7.0), (200, 7.0)]
    assert run.data.metrics["rank_0/time/sps"] == 5.0


def test_wandb_works_offline_and_goes_on_under_the_same_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for iteration in (1, 2):
        writer = writer_of(tmp_path, loggers=["wandb"], config=CONFIG, start=iteration - 1)
        writer.write(record(iteration, **{"episode/return": 7.0}), done=iteration)
        writer.close()
    name = (tmp_path / "wandb_run_id").read_text()
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}"))
    assert folders and all(list(folder.glob(f"run-{name}.wandb")) for folder in folders)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["iteration"] == 2
