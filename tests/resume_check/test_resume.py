"""A killed run resumes exactly: no gaps, refused changes, no overwritten files."""

import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_envs
import torch
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard_readers import seen
from train_runs import RECALL, only_error, records, train_here

from agents import rank
from agents.evaluate import final
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import outlive_readers
from rl_dist.process_group.world import World
from rl_dist.resume_check import differences, parameter_sha256, result_of
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import MetricsWriter

TINY = [*RECALL, "--eval_episodes", "2", "--total_steps", "256"]
TINY += ["--env", "resume_envs:Forgetful-v0", "--scaling", "weak"]
MAIN = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of an environment that cannot be saved, as a kill after iteration 2 of 4 leaves it."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    flags = [*TINY, "--checkpoint_every", "2", "--run_dir", run_dir]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *flags) == 0
    (run_dir / "checkpoints" / "iteration_00000004.pt").unlink()
    (run_dir / "summary.json").unlink()
    return run_dir


@pytest.fixture
def run_dir(killed, tmp_path):
    """A copy of it."""
    return shutil.copytree(killed, tmp_path / "run")


def tree_hash(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def refusal(monkeypatch, capsys):
    """The stderr of a resume that is refused, and changes no byte."""

    def resume(run_dir, *flags, resume=None):
        before = tree_hash(run_dir)
        assert train_here(monkeypatch, "--resume", resume or run_dir, *flags) == 2
        assert tree_hash(run_dir) == before
        return capsys.readouterr().err

    return resume


# ---- environments that cannot be saved


def test_an_environment_without_the_protocol_is_announced_and_resumes_deterministically(
    killed, tmp_path, monkeypatch, capsys
):
    for name in ("once", "again"):
        shutil.copytree(killed, tmp_path / name)
        assert train_here(monkeypatch, "--resume", tmp_path / name) == 0
        assert (
            "Forgetful-v0 cannot be snapshotted: after --resume its episodes begin again"
            in capsys.readouterr().out
        )
    once, again = tmp_path / "once", tmp_path / "again"
    assert differences(result_of(once), result_of(again)) == []
    assert parameter_sha256(once) == parameter_sha256(again)
    assert records(once)[:2] == records(killed)[:2]
    assert [line["iteration"] for line in records(once)] == [1, 2, 3, 4]
    # other episodes than before
    assert records(once)[2]["loss/value"] != records(killed)[2]["loss/value"]


# ---- what differs is refused, and nothing is touched


def test_all_that_differs_is_named_in_one_line_and_nothing_is_overwritten(killed, refusal):
    flags = ["--seed", 2, "--env", "CartPole-v1", "--hidden_size", 16, "--learning_rate", 1]
    line = only_error(refusal(killed, *flags))
    expected = ["--env CartPole-v1 (it has resume_envs:Forgetful-v0)", "--seed 2 (it has 1)"]
    expected += ["--hidden_size 16 (it has 8)", "--learning_rate 1.0 (it has 0.0007)"]
    assert all(words in line for words in expected), line


def test_an_environment_of_another_size_is_refused_before_anything_is_written(
    killed, monkeypatch, refusal
):
    actions = resume_envs.gymnasium.spaces.Discrete(5)
    monkeypatch.setattr(resume_envs, "SIZE", 3)
    monkeypatch.setattr(resume_envs.Forgetful, "action_space", actions)
    line = only_error(refusal(killed))
    assert "num_actions 5 (it has 2), num_obs 3 (it has 2)" in line


@pytest.mark.slow
def test_a_weak_run_goes_on_with_its_totals_on_another_number_of_ranks(run_dir, monkeypatch):
    assert train_here(monkeypatch, "--resume", run_dir, "--num_gpus", "2") == 0
    counted = [(line["iteration"], line["global_step"]) for line in records(run_dir)]
    assert counted == [(i, 64 * i) for i in range(1, 5)]


def test_two_trainings_never_write_to_one_run_directory(killed, monkeypatch, refusal):
    monkeypatch.setattr(RunDir.hold, "__defaults__", (0.3,))
    with RunDir(killed).hold():
        assert "is in use by another training" in only_error(refusal(killed))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(run_dir, refusal):
    for path in (run_dir / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    err = refusal(run_dir, *TINY, "--run_dir", run_dir, resume="auto")
    assert "holds no valid checkpoint" in err


def test_output_that_nobody_reads_any_more_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with pytest.raises(BrokenPipeError):
        print("lost", flush=True)
    outlive_readers()
    print("lost, too", flush=True)


# ---- a disk that is full, results that are out of date


def without_logs(run_dir):
    return {name: sha for name, sha in tree_hash(run_dir).items() if not name.startswith("rank_")}


@pytest.mark.parametrize("refuses", ["config.json", "metrics.jsonl"])
def test_a_disk_that_is_full_at_a_resume_costs_one_line_and_no_byte(
    refuses, run_dir, tmp_path, monkeypatch, capsys, limits
):
    # an unchanged configuration is not written
    changes = ["--keep_checkpoints", 4] if refuses == "config.json" else []
    assert (run_dir / "metrics.jsonl").stat().st_size > 2 * 1000
    before = without_logs(run_dir)
    limits(1000)
    note = f"cat > {tmp_path}/event"
    assert train_here(monkeypatch, "--resume", run_dir, "--on_event", note, *changes) == 1
    limits(None)
    assert without_logs(run_dir) == before
    line = only_error(capsys.readouterr().err)
    assert line.startswith(
        f"error: {run_dir}/{refuses} cannot be written: File too large; make room"
    )
    event = json.loads((tmp_path / "event").read_text())
    assert (event["event"], event["exit_code"]) == ("failed", 1) and event["message"] in line
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert [record["iteration"] for record in records(run_dir)] == [1, 2, 3, 4]


def test_a_disk_that_is_full_when_a_run_is_judged_costs_one_line_and_no_training(
    run_dir, tmp_path, monkeypatch, capsys, limits
):
    finish = final.finish
    monkeypatch.setattr(final, "finish", lambda *parts: (limits(2000), finish(*parts)))
    note = f"cat > {tmp_path}/event"
    assert train_here(monkeypatch, "--resume", run_dir, "--on_event", note) == 1
    limits(None)
    lines = capsys.readouterr().err.splitlines()
    line = only_error("\n".join(line for line in lines if not line.startswith("iteration ")))
    assert "cannot be written: File too large; make room, then continue with --resume" in line
    assert json.loads((tmp_path / "event").read_text())["event"] == "failed"
    assert not (run_dir / "summary.json").exists()
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 4
    monkeypatch.undo()
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert json.loads((run_dir / "summary.json").read_text())["iteration"] == 4


def test_a_finished_run_that_goes_on_no_longer_says_that_it_has_finished(run_dir, monkeypatch):
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    summary = (run_dir / "summary.json").read_text()
    digest = hashlib.sha256()
    for name, tensor in result_of(run_dir).items():
        if name.startswith("policy/"):
            digest.update(tensor.contiguous().numpy().tobytes())
    assert json.loads(summary)["parameter_sha256"] == digest.hexdigest()
    assert train_here(monkeypatch, "--resume", run_dir) == 0  # nothing to train: evaluated again
    assert (run_dir / "summary.json").read_text() == summary

    def killed_while_training(*_):
        raise ValueError("killed")

    monkeypatch.setattr(rank, "train", killed_while_training)
    assert train_here(monkeypatch, "--resume", run_dir, "--total_steps", "320") == 2
    assert not (run_dir / "summary.json").exists()


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "2026-01-31_12-00-00")
    with ThreadPoolExecutor(16) as pool:
        made = [run.path for run in pool.map(RunDir.fresh, [tmp_path / "runs"] * 64)]
    assert len(set(made)) == 64 and all(path.is_dir() for path in made)
    assert {"2026-01-31_12-00-00", "2026-01-31_12-00-00_10"} < {path.name for path in made}


# ---- TensorBoard's record


def write(run_dir, iterations, factor=1.0, purge_step=1):
    """Write some iterations as one process does."""
    before = set(run_dir.glob("events.*"))
    begin(run_dir, iterations, factor, purge_step).close()
    # files are read by name, which within a second is no order
    (new,) = set(run_dir.glob("events.*")) - before
    new.rename(run_dir / f"events.out.tfevents.{time.monotonic_ns():020d}")


def begin(run_dir, iterations, factor=1.0, purge_step=1):
    writer = MetricsWriter(RunDir(run_dir), total=10, unit="steps", purge_step=purge_step)
    for iteration in iterations:
        record = {"iteration": iteration, "global_step": 10 * iteration, "x": factor * iteration}
        writer.write(record, done=iteration)
    return writer


def test_tensorboard_forgets_what_a_resume_undid_and_keeps_the_rest(tmp_path):
    write(tmp_path, (1, 2, 3, 4))
    write(tmp_path, (3,), factor=10.0, purge_step=21)
    assert seen(tmp_path, "x") == [(10, 1.0), (20, 2.0), (30, 30.0)]
    write(tmp_path, (3, 4), factor=100.0, purge_step=21)  # killed before a new checkpoint
    assert seen(tmp_path, "x") == [(10, 1.0), (20, 2.0), (30, 300.0), (40, 400.0)]


def test_what_is_flushed_outlives_a_writer_that_is_never_closed(tmp_path, monkeypatch):
    write_record = RecordWriter.write

    def write_slowly(self, data):
        time.sleep(0.02)
        write_record(self, data)

    monkeypatch.setattr(RecordWriter, "write", write_slowly)
    writer = begin(tmp_path / "run", range(1, 21))  # TensorBoard's thread cannot keep up with this
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # what a kill at this moment would leave
    assert seen(tmp_path / "copy", "x") == [(10 * i, float(i)) for i in range(1, 21)]
    assert len(records(tmp_path / "copy")) == 20
    writer.close()
