"""The files and the progress display of the main process."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_dist.errors import UserError
from rl_dist.process_group.world import World
from rl_dist.telemetry.metrics import (
    MetricsWriter,
    NullWriter,
    close_logging,
    open_writer,
    setup_logging,
    truncate_metrics,
)


def world_of_rank(rank):
    return World(rank=rank, local_rank=rank, size=2, device=torch.device("cpu"), backend="gloo")


def record(iteration, **values):
    return {"iteration": iteration, "global_step": 100 * iteration, **values}


def read(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def scalars(run_dir):
    board = EventAccumulator(str(run_dir))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_values_that_are_not_finite_become_null_and_each_line_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=None, unit="steps")
    values = {"a": math.nan, "b": torch.tensor(2.5), "c": np.float32(1.5), "d": [math.inf, None]}
    writer.write(record(1, **values), done=1)
    (line,) = read(tmp_path)  # before close
    assert line == record(1, a=None, b=2.5, c=1.5, d=[None, None])
    writer.close()
    writer.close()


def test_tensorboard_has_scalars_by_global_step_and_tags_by_rank(tmp_path):
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=10, unit="steps")
    ranks = [{"rank": 0, "episode/return": 1.0}, {"rank": 1, "episode/return": None}]
    writer.write(record(1, ranks=ranks, **{"loss/value": 0.5, "loss/policy": math.nan}), done=1)
    writer.close()
    assert scalars(tmp_path) == {"loss/value": [(100, 0.5)], "rank_0/episode/return": [(100, 1.0)]}


def test_a_resumed_run_continues_its_files_without_doubles(tmp_path):
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=10, unit="steps")
    for iteration in (1, 2, 3):
        writer.write(record(iteration, x=float(iteration)), done=iteration)
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "glob')  # torn by a kill
    assert truncate_metrics(tmp_path, 2) == 2
    writer = MetricsWriter(tmp_path, world_of_rank(0), 10, "steps", start=2, purge_step=201)
    writer.write(record(3, x=30.0), done=3)
    writer.close()
    assert [(line["iteration"], line["x"]) for line in read(tmp_path)] == [(1, 1), (2, 2), (3, 30)]
    assert sorted(scalars(tmp_path)["x"]) == [(100, 1.0), (200, 2.0), (300, 30.0)]


def test_cutting_metrics_that_do_not_exist_is_no_error(tmp_path):
    assert truncate_metrics(tmp_path, 5) == 0
    assert not list(tmp_path.iterdir())


def test_other_ranks_write_nothing(tmp_path):
    writer = open_writer(tmp_path, world_of_rank(1), total=10, unit="steps")
    writer.write(record(1), done=1)
    writer.say("hello")
    writer.close()
    assert type(writer) is NullWriter
    assert not list(tmp_path.iterdir())
    assert isinstance(open_writer(tmp_path, world_of_rank(0), 10, "steps"), MetricsWriter)


def test_progress_without_a_terminal_is_a_few_plain_lines(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=2000, unit="episodes")
    for iteration in range(1, 11):
        values = {"time/sps": 7123.4, "episode/return": 0.25 if iteration == 1 else None}
        writer.write(record(iteration, **values), done=200 * iteration)
    writer.close()
    first, last = capsys.readouterr().err.splitlines()
    figures = "steps/s 7,123 | return 0.25 | ETA "
    assert first.startswith(f"iteration 1 | 200/2,000 episodes (10%) | {figures}")
    assert last.startswith(f"iteration 10 | 2,000/2,000 episodes (100%) | {figures}")


def test_the_throughput_shown_is_the_median_of_the_latest_iterations(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=2000, unit="episodes")
    rates = [9000.0, *[100.0] * 3, 900.0, 110.0, 120.0, 130.0, 95.0, 5000.0, None]
    for iteration, rate in enumerate(rates, 1):
        writer.write(record(iteration, **{"time/sps": rate}), done=iteration)
    writer.close()
    # of nine; the first has been forgotten
    assert "| steps/s 110 |" in capsys.readouterr().err.splitlines()[-1]


def test_progress_on_a_terminal_is_one_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    writer = MetricsWriter(tmp_path, world_of_rank(0), total=20, unit="episodes", start=5)
    writer.write(record(1, **{"time/sps": 50.0, "episode/return": 1.5}), done=10)
    writer.close()
    shown = capsys.readouterr().err
    assert "10/20" in shown and "return=1.5" in shown and shown.count("\n") == 1


def test_a_run_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="run_dir .*file.* cannot be written"):
        MetricsWriter(blocked / "run", world_of_rank(0), total=1, unit="steps")
    with pytest.raises(UserError, match="cannot be written"):
        setup_logging(blocked / "run", rank=0)


def test_logs_have_time_level_and_rank_and_the_console_warnings_of_the_main_process(
    tmp_path, capsys
):
    try:
        for rank in (0, 1):
            path = setup_logging(tmp_path, rank)
            logging.getLogger("some.module").info("a detail of %d", rank)
            logging.getLogger("some.module").warning("a warning of %d", rank)
            (kept,) = path.with_suffix(".jsonl").read_text().splitlines()
            found = json.loads(kept)
            assert (found["level"], found["rank"]) == ("WARNING", rank)
            assert found["text"] == f"a warning of {rank}"
            lines = path.read_text().splitlines()
            assert [line.split(" ", 2)[2] for line in lines] == [
                f"INFO rank {rank} some.module: a detail of {rank}",
                f"WARNING rank {rank} some.module: a warning of {rank}",
            ]
    finally:
        close_logging()
    assert capsys.readouterr().err == "warning: a warning of 0\n"
