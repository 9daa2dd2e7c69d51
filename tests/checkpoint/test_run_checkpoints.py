"""Checkpoints that training writes: the best one, and disks that fail."""

import resource

import psutil
import pytest
from agents_ranks import make_job, run_loop
from train_runs import (
    PATIENCE_S,
    RECALL,
    assert_nobody_left,
    iterations,
    only_error,
    records,
    start_training,
    wait_until,
)

from agents.learner.trainer import Training
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import MetricsWriter, NullWriter

BEST = {"keep_best": "valid/score"}
EACH = {"checkpoint_every": 1}
CONTINUE = EACH | {"on_save_error": "continue"}


class ActingWriter(NullWriter):
    """Writer that calls `act(iteration)` before the checkpoint is saved."""

    def __init__(self, act):
        self.act = act

    def write(self, record, *, done):
        self.act(record["iteration"])


def run(world, run_dir, values, *, first=0, act=None, writer=None, **train_options):
    """Train one iteration for each valid/score in `values`.

    If `first` is above 0, resume from the checkpoint of iteration `first`.
    """
    options = {"checkpoint_every": 1000, "validate_every": 1} | train_options
    job = make_job("recall, mlp, KL stop", run_dir, iterations=len(values), **options)
    left = iter(values[first:])
    training = Training(job, job.make_env, world)
    if first:
        training.restore(load_checkpoint(latest_checkpoint(run_dir)))
        assert training.iteration == first
    run_loop(
        training,
        writer or (ActingWriter(act) if act else NullWriter()),
        validate=lambda *_: {"valid/score": next(left), "valid/other": 1.0},
    )


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def best_of(run_dir):
    state = load_checkpoint(run_dir / "checkpoints" / "best.pt")
    return state["iteration"], state["measured"]["valid/score"]


# ---- the best checkpoint


@pytest.mark.parametrize(
    "values, later, best",
    [
        ([1.0, float("nan"), 3.0, 3.0, 2.0, 2.5], [], (4, 3.0)),  # the last of equal scores wins
        ([1.0, 9.0, 2.0], [3.0], (2, 9.0)),
        ([1.0, 9.0, 2.0], [10.0], (4, 10.0)),
    ],
)
def test_the_best_checkpoint_is_kept_after_many_iterations_and_a_resume(
    values, later, best, world, tmp_path
):
    run(world, tmp_path, values, **BEST, keep_checkpoints=1)
    if later:
        run(world, tmp_path, values + later, first=len(values), **BEST, keep_checkpoints=1)
    assert names(tmp_path) == ["best.pt", f"iteration_{len(values + later):08d}.pt"]
    assert best_of(tmp_path) == best


def test_the_best_checkpoint_of_a_repeated_iteration_is_kept(world, tmp_path):
    """The run is killed after iteration 2 wrote best.pt but no other checkpoint."""
    run(world, tmp_path, [1.0, 9.0], **BEST, **EACH)
    (tmp_path / "checkpoints" / "iteration_00000002.pt").unlink()
    run(world, tmp_path, [1.0, 8.0, 5.0], first=1, **BEST)
    assert best_of(tmp_path) == (2, 9.0)


@pytest.mark.parametrize("before", ["valid/other", ""])
def test_a_best_checkpoint_of_another_metric_or_a_damaged_one_is_replaced(world, tmp_path, before):
    run(world, tmp_path, [9.0], keep_best=before or "valid/score")
    if not before:
        (tmp_path / "checkpoints" / "best.pt").write_bytes(b"PK\x03\x04")
    run(world, tmp_path, [9.0, 2.0], first=1, **BEST)
    assert best_of(tmp_path) == (2, 2.0)


@pytest.mark.parametrize("metric, value", [("auto", 1.0), ("off", 1.0), ("valid/score", None)])
def test_no_best_checkpoint_is_saved_without_a_metric_or_a_value(world, tmp_path, metric, value):
    run(world, tmp_path, [value], keep_best=metric)
    assert names(tmp_path) == ["iteration_00000001.pt"]


# ---- disks that reject writes


def test_training_stops_if_a_save_fails_and_the_old_checkpoint_is_kept(world, tmp_path, limits):
    def act(iteration):
        limits(2000 if iteration == 3 else None)

    with pytest.raises(UserError, match="File too large") as error:
        run(world, tmp_path, [1.0] * 4, act=act, **EACH)
    limits(None)
    assert error.value.exit_code == 1 and load_checkpoint(latest_checkpoint(tmp_path))
    assert names(tmp_path) == ["iteration_00000001.pt", "iteration_00000002.pt"]


def test_training_continues_on_request_and_saves_again_when_it_can(world, tmp_path, limits, caplog):
    def act(iteration):
        limits(2000 if iteration in (2, 3) else None)

    run(world, tmp_path, [1.0, 9.0, 3.0, 2.0], act=act, **BEST, **CONTINUE)
    lines = [line for line in caplog.messages if "cannot write" in line]
    # The saves of best.pt in iterations 2 and 3 failed.
    assert ["best.pt" in line for line in lines] == [True, True]
    assert names(tmp_path) == ["best.pt", "iteration_00000001.pt", "iteration_00000004.pt"]
    # The better policies of iterations 2 and 3 could not be saved.
    assert best_of(tmp_path) == (4, 2.0)


@pytest.mark.slow
def test_two_ranks_stop_together_when_the_disk_rejects_a_save(tmp_path):
    flags = [*RECALL, "--checkpoint_every=5", "--num_gpus=2", "--total_steps", 10**9]
    job = start_training(*flags, "--validate_every=0", "--run_dir", tmp_path)
    wait_until((tmp_path / "checkpoints" / "iteration_00000005.pt").exists, job)
    for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    err = job.communicate(timeout=PATIENCE_S)[1]
    lines = [line for line in err.splitlines() if not line.startswith("iteration ")]
    assert job.returncode == 1 and "File too large" in only_error("\n".join(lines)), err
    assert_nobody_left(job.pid)
    assert all(name.endswith(".pt") for name in names(tmp_path))
    saved = load_checkpoint(latest_checkpoint(tmp_path))["iteration"]
    assert records(tmp_path)[-1]["iteration"] == saved + 5


@pytest.mark.parametrize("finish", ["write", "flush", "close"])
def test_metrics_wait_in_memory_for_a_full_disk_and_nothing_is_lost(
    tmp_path, limits, caplog, finish
):
    writer = MetricsWriter(RunDir(tmp_path), total=6, unit="episodes")
    writer.flush()  # waits until TensorBoard's thread has created the event file

    def write(iteration):
        writer.write({"iteration": iteration, "global_step": iteration, "x": 0.5}, done=iteration)

    for iteration in (1, 2, 3):
        size = (tmp_path / "metrics.jsonl").stat().st_size
        limits(size + 20 if iteration > 1 else None)  # the disk fills up in the middle of a line
        write(iteration)
    assert iterations(tmp_path) == [1]
    limits(None)
    write(4) if finish == "write" else getattr(writer, finish)()
    assert iterations(tmp_path)[:3] == [1, 2, 3]
    writer.close()
    assert sum("lines wait in memory" in line for line in caplog.messages) == 1
