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
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import (
    MetricsWriter,
    NullWriter,
    close_logging,
    open_writer,
    setup_logging,
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


def writer_of(run_dir, total=10, unit="steps", **options):
    return MetricsWriter(RunDir(run_dir), total, unit, **options)


def test_values_that_are_not_finite_become_null_and_each_line_is_on_disk_at_once(tmp_path):
    writer = writer_of(tmp_path)
    values = {"a": math.nan, "b": torch.tensor(2.5), "c": np.float32(1.5), "d": [math.inf, None]}
    writer.write(record(1, **values), done=1)
    (line,) = read(tmp_path)  # before close
    assert line == record(1, a=None, b=2.5, c=1.5, d=[None, None])
    writer.close()
    writer.close()


def test_tensorboard_has_scalars_by_global_step_and_tags_by_rank(tmp_path):
    writer = writer_of(tmp_path)
    ranks = [{"rank": 0, "episode/return": 1.0}, {"rank": 1, "episode/return": None}]
    writer.write(record(1, ranks=ranks, **{"loss/value": 0.5, "loss/policy": math.nan}), done=1)
    writer.close()
    assert scalars(tmp_path) == {"loss/value": [(100, 0.5)], "rank_0/episode/return": [(100, 1.0)]}


def test_a_resumed_run_continues_its_files_without_doubles(tmp_path):
    assert RunDir(tmp_path).cut_records(5) == 0  # there are none
    writer = writer_of(tmp_path)
    for iteration in (1, 2, 3):
        writer.write(record(iteration, x=float(iteration)), done=iteration)
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "glob')  # torn by a kill
    assert RunDir(tmp_path).cut_records(2) == 2
    writer = writer_of(tmp_path, start=2, purge_step=201)
    writer.write(record(3, x=30.0), done=3)
    writer.close()
    assert [(line["iteration"], line["x"]) for line in read(tmp_path)] == [(1, 1), (2, 2), (3, 30)]
    assert sorted(scalars(tmp_path)["x"]) == [(100, 1.0), (200, 2.0), (300, 30.0)]


def test_other_ranks_write_nothing(tmp_path):
    writer = open_writer(RunDir(tmp_path), world_of_rank(1), total=10, unit="steps")
    writer.write(record(1), done=1)
    writer.say("hello")
    writer.close()
    assert type(writer) is NullWriter
    assert not list(tmp_path.iterdir())
    assert isinstance(open_writer(RunDir(tmp_path), world_of_rank(0), 10, "steps"), MetricsWriter)


def test_a_run_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for act in (writer_of, lambda folder: setup_logging(folder, rank=0)):
        with pytest.raises(UserError, match="file.* cannot be written"):
            act(blocked / "run")


def test_logs_have_time_level_and_rank_and_the_console_warnings_of_the_main_process(
    tmp_path, capsys
):
    try:
        for rank in (0, 1):
            setup_logging(tmp_path, rank)
            path = tmp_path / "logs" / f"rank_{rank}.log"
            logging.getLogger("some.module").info("a detail of %d", rank)
            logging.getLogger("some.module").warning("a warning of %d", rank)
            assert f"a warning of {rank}" in [m["text"] for m in RunDir(tmp_path).messages()]
            lines = path.read_text().splitlines()
            assert [line.split(" ", 2)[2] for line in lines] == [
                f"INFO rank {rank} some.module: a detail of {rank}",
                f"WARNING rank {rank} some.module: a warning of {rank}",
            ]
    finally:
        close_logging()
    assert capsys.readouterr().err == "warning: a warning of 0\n"
