"""Checkpoints of whole runs: the best one, and disks that refuse them."""

import resource
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from agents_ranks import make_job
from train_runs import (
    PATIENCE_S,
    RECALL,
    assert_nobody_left,
    only_error,
    records,
    start_training,
    wait_until,
)

from agents.trainer import Training, train
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import UserError
from rl_dist.process_group.world import StopFlag
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import MetricsWriter, NullWriter, open_writer

FOREVER = [*RECALL, "--checkpoint_every", 1, "--num_gpus", 2, "--total_steps", 10**9]
FOREVER += ["--keep_checkpoints", 2, "--validate_every", 0]


class Acting(NullWriter):
    """Calls `act(iteration)` when an iteration's metrics are written, before its checkpoint."""

    def __init__(self, act):
        self.act = act

    def write(self, record, *, done):
        self.act(record["iteration"])


def run(
    world, run_dir, values, *, first=0, act=lambda iteration: None, writer=None, **train_options
):
    """Train an iteration for each of `values` of valid/score; the `first` ones are saved."""
    options = {"checkpoint_every": 1000, "validate_every": 1} | train_options
    job = make_job("recall, mlp, KL stop", run_dir, iterations=len(values), **options)
    left = iter(values[first:])
    job = replace(job, validate=lambda *_: {"valid/score": next(left), "valid/other": 1.0})
    training = Training(job, world)
    if first:
        training.restore(load_checkpoint(latest_checkpoint(run_dir)))
        assert training.iteration == first
    train(training, writer or Acting(act), StopFlag())
    return training


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def best_of(run_dir):
    state = load_checkpoint(Path(run_dir, "checkpoints", "best.pt"))
    return state["iteration"], state["measured"]


# ---- the best

# values of valid/score in two goes, then iteration and value of best.pt
BESTS = {
    "however many follow": ([1.0, float("nan"), 3.0, 3.0, 2.0, 2.5], [], 3, 3.0),
    "no worse one after a resume": ([1.0, 9.0, 2.0], [3.0], 2, 9.0),
    "a better one after a resume": ([1.0, 9.0, 2.0], [10.0], 4, 10.0),
}


@pytest.mark.parametrize("case", BESTS)
def test_the_best_is_kept(case, world, tmp_path):
    values, later, iteration, best = BESTS[case]
    options = {"keep_best": "valid/score", "keep_checkpoints": 1}
    run(world, tmp_path, values, **options)
    if later:
        run(world, tmp_path, values + later, first=len(values), **options)
    last = len(values + later)
    assert names(tmp_path) == ["best.pt", f"iteration_{last:08d}.pt"]
    assert best_of(tmp_path) == (iteration, {"valid/score": best})  # the first of equals


def test_a_best_of_an_iteration_that_is_repeated_stays(world, tmp_path):
    """Killed after best.pt was written and before the checkpoint beside it was."""
    run(world, tmp_path, [1.0, 9.0], keep_best="valid/score", checkpoint_every=1)
    (tmp_path / "checkpoints" / "iteration_00000002.pt").unlink()
    run(world, tmp_path, [1.0, 8.0, 5.0], first=1, keep_best="valid/score")
    assert best_of(tmp_path) == (2, {"valid/score": 9.0})


@pytest.mark.parametrize("before", ["valid/other", ""])
def test_a_best_by_another_metric_or_damaged_gives_way_with_a_warning(
    world, tmp_path, caplog, before
):
    run(world, tmp_path, [9.0], keep_best=before or "valid/score")
    if not before:
        path = tmp_path / "checkpoints" / "best.pt"
        path.write_bytes((tmp_path / "checkpoints" / "iteration_00000001.pt").read_bytes()[:-9])
    run(world, tmp_path, [9.0, 2.0], first=1, keep_best="valid/score")
    assert best_of(tmp_path) == (2, {"valid/score": 2.0})
    assert sum("best.pt" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("metric", "values"), [("auto", [1.0]), ("off", [1.0]), ("valid/score", [float("nan")])]
)
def test_no_best_is_kept_where_none_is_asked_for_or_measured(world, tmp_path, metric, values):
    run(world, tmp_path, values, keep_best=metric)
    assert names(tmp_path) == ["iteration_00000001.pt"]


def test_a_metric_that_is_no_number_is_refused(world, tmp_path):
    with pytest.raises(UserError, match="keep_best ranks is no number"):
        run(world, tmp_path, [1.0, 2.0], keep_best="ranks")
    assert not (tmp_path / "checkpoints").exists()


# ---- a run directory that is deleted or replaced


@pytest.mark.parametrize(("replaced", "on_save_error"), [(False, "stop"), (True, "continue")])
def test_training_ends_when_its_directory_is_no_longer_there_and_touches_no_other(
    world, tmp_path, replaced, on_save_error
):
    run_dir = tmp_path / "run"
    held = RunDir(run_dir).hold()
    writer = open_writer(held, world, total=6, unit="episodes")

    def write(record, *, done):
        if record["iteration"] == 3:
            run_dir.rename(tmp_path / "moved")
            if replaced:
                run_dir.mkdir()
                (run_dir / "metrics.jsonl").write_text("of another run")
        MetricsWriter.write(writer, record, done=done)

    writer.write = write
    options = {"writer": writer, "checkpoint_every": 1, "on_save_error": on_save_error}
    with pytest.raises(UserError, match="deleted or replaced") as error:
        run(world, run_dir, [1.0] * 6, **options)
    writer.close()
    held.release()
    assert error.value.exit_code == 1 and str(run_dir) in str(error.value)
    assert latest_checkpoint(tmp_path / "moved").name == "iteration_00000002.pt"
    assert [path.name for path in tmp_path.glob("run/*")] == ["metrics.jsonl"] * replaced
    assert not replaced or (run_dir / "metrics.jsonl").read_text() == "of another run"


# ---- disks that refuse


def test_training_stops_at_a_save_that_fails_and_the_old_checkpoint_stays(world, tmp_path, limits):
    def act(iteration):
        limits(2000 if iteration == 3 else None)

    with pytest.raises(UserError) as error:
        run(world, tmp_path, [1.0] * 4, checkpoint_every=1, act=act)
    limits(None)
    message = str(error.value)
    for words in ("iteration_00000003.pt", "File too large", f"--resume {tmp_path} continues"):
        assert words in message
    assert error.value.exit_code == 1
    assert names(tmp_path) == ["iteration_00000001.pt", "iteration_00000002.pt"]
    load_checkpoint(tmp_path / "checkpoints" / "iteration_00000002.pt")


def test_training_goes_on_where_asked_and_saves_again_when_it_can(world, tmp_path, limits, caplog):
    def act(iteration):
        limits(2000 if iteration in (2, 3) else None)

    options = {"checkpoint_every": 1, "keep_best": "valid/score", "on_save_error": "continue"}
    run(world, tmp_path, [1.0, 9.0, 3.0, 2.0], act=act, **options)
    lines = [line for line in caplog.messages if "cannot write" in line]
    assert ["best.pt" in line for line in lines] == [True, True]  # of iterations 2 and 3
    assert names(tmp_path) == ["best.pt", "iteration_00000001.pt", "iteration_00000004.pt"]
    assert best_of(tmp_path) == (4, {"valid/score": 2.0})  # better ones were lost with their saves


def test_the_last_save_must_succeed_in_any_case(world, tmp_path, limits):
    with pytest.raises(UserError, match="File too large.* there is no earlier one$"):
        run(world, tmp_path, [1.0, 2.0], act=lambda _: limits(2000), on_save_error="continue")
    limits(None)  # before pytest writes its next dot, perhaps to a file


def limit_tree(pid, num_bytes):
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_two_ranks_stop_together_when_the_disk_refuses(tmp_path):
    run_dir = tmp_path / "run"
    job = start_training(*FOREVER, "--checkpoint_every", 5, "--run_dir", run_dir)
    wait_until((run_dir / "checkpoints" / "iteration_00000005.pt").exists, job)
    limit_tree(job.pid, 40_000)
    err = job.communicate(timeout=PATIENCE_S)[1]
    lines = [line for line in err.splitlines() if not line.startswith("iteration ")]
    assert job.returncode == 1 and "Traceback" not in err, err
    line = only_error("\n".join(lines))
    assert f"error: cannot write checkpoint {run_dir}/checkpoints/iteration_" in line
    assert "bytes): File too large" in line and f"--resume {run_dir} continues" in line
    assert_nobody_left(job.pid)
    assert all(name.endswith(".pt") for name in names(run_dir))
    saved = load_checkpoint(latest_checkpoint(run_dir))["iteration"]
    assert records(run_dir)[-1]["iteration"] == saved + 5


def write(writer, iteration):
    writer.write({"iteration": iteration, "global_step": iteration, "x": 0.5}, done=iteration)


@pytest.mark.parametrize("finish", ["write", "flush", "close"])
def test_metrics_wait_in_memory_for_a_full_disk_and_nothing_is_lost(
    world, tmp_path, limits, caplog, finish
):
    writer = open_writer(RunDir(tmp_path), world, total=6, unit="episodes")
    writer.flush()  # TensorBoard's thread has begun its file
    for iteration in (1, 2, 3):
        size = (tmp_path / "metrics.jsonl").stat().st_size
        limits(size + 20 if iteration > 1 else None)  # in the midst of a line
        write(writer, iteration)
    assert [line["iteration"] for line in records(tmp_path)] == [1]
    limits(None)
    expected = [1, 2, 3]
    if finish == "write":
        write(writer, 4)
        expected.append(4)
    else:
        getattr(writer, finish)()
    assert [line["iteration"] for line in records(tmp_path)] == expected
    writer.close()
    assert sum("lines wait in memory" in line for line in caplog.messages) == 1
