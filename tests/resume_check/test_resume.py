"""A killed run goes on exactly: files without gaps, all differences refused at once, nothing overwritten."""

import errno
import hashlib
import json
import os
import resource
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import resume_envs
import torch
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard_readers import seen
from train_runs import only_error, records, train_here

import train_distributed
from agents.evaluate import final
from agents.run.config import fresh_directory
from rl_dist.checkpoint import run_lock
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import latest_checkpoint, save_checkpoint
from rl_dist.errors import outlive_readers
from rl_dist.process_group.world import World
from rl_dist.resume_check.comparison import differences, parameter_sha256, result_of
from rl_dist.telemetry.metrics import MetricsWriter, truncate_metrics

TINY = [
    *("--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8", "--batch_size", "4", "--hidden_size", "8"),
    *("--eval_episodes", "2", "--device", "cpu", "--total_steps", "256"),
]
MAIN = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of an environment that cannot be saved, as a kill after iteration 2 of 4 leaves it, and its stdout."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    flags = [*TINY, "--env", "resume_envs:Forgetful-v0", "--scaling", "weak", "--checkpoint_every", "2"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *flags, "--run_dir", run_dir) == 0
    (run_dir / "checkpoints" / "iteration_00000004.pt").unlink()
    (run_dir / "summary.json").unlink()
    return run_dir


def tree_hash(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- environments that cannot be saved


def test_an_environment_without_the_protocol_is_announced_and_resumes_deterministically(
    killed, tmp_path, monkeypatch, capsys
):
    for name in ("once", "again"):
        shutil.copytree(killed, tmp_path / name)
        assert train_here(monkeypatch, "--resume", tmp_path / name) == 0
        assert "Forgetful-v0 cannot be snapshot: after --resume its episodes begin anew" in capsys.readouterr().out
    once, again = tmp_path / "once", tmp_path / "again"
    assert differences(result_of(once), result_of(again)) == []
    assert parameter_sha256(once) == parameter_sha256(again)
    assert records(once)[:2] == records(killed)[:2]
    assert [line["iteration"] for line in records(once)] == [1, 2, 3, 4]
    assert records(once)[2]["loss/value"] != records(killed)[2]["loss/value"]  # other episodes than before


# ---- what differs is refused, and nothing is touched


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seed", "2"], ["--seed 2 (it has 1); leave out"]),
        (
            ["--seed", "2", "--env", "CartPole-v1", "--hidden_size", "16", "--learning_rate", "1"],
            ["--env CartPole-v1 (it has resume_envs:Forgetful-v0)", "--seed 2 (it has 1)"]
            + ["--hidden_size 16 (it has 8)", "--learning_rate 1.0 (it has 0.0003)"],
        ),
    ],
    ids=["seed", "seed, environment and more"],
)
def test_all_that_differs_is_named_in_one_line_and_nothing_is_overwritten(flags, expected, killed, monkeypatch, capsys):
    before = tree_hash(killed)
    assert train_here(monkeypatch, "--resume", killed, *flags) == 2
    line = only_error(capsys.readouterr().err)
    assert "differs from the run to resume: " in line and all(words in line for words in expected), line
    assert tree_hash(killed) == before


def test_an_environment_of_another_size_is_refused_before_anything_is_written(killed, monkeypatch, capsys):
    before = tree_hash(killed)
    monkeypatch.setattr(resume_envs, "SIZE", 3)
    monkeypatch.setattr(resume_envs.Forgetful, "action_space", resume_envs.gymnasium.spaces.Discrete(5))
    assert train_here(monkeypatch, "--resume", killed) == 2
    line = only_error(capsys.readouterr().err)
    assert "actions 5 discrete (it has 2 discrete), observation size 3 (it has 2)" in line
    assert tree_hash(killed) == before


@pytest.mark.slow
def test_a_weak_run_goes_on_with_its_totals_on_another_number_of_ranks(killed, tmp_path, monkeypatch):
    run_dir = tmp_path / "weak"
    shutil.copytree(killed, run_dir)
    assert train_here(monkeypatch, "--resume", run_dir, "--num_gpus", "2") == 0
    assert [(line["iteration"], line["global_step"]) for line in records(run_dir)] == [(i, 64 * i) for i in range(1, 5)]


def test_two_trainings_never_write_to_one_run_directory(killed, monkeypatch, capsys):
    before = tree_hash(killed)
    monkeypatch.setattr(run_lock.hold, "__defaults__", (0.3,))
    with run_lock.hold(killed / "config.json"):
        assert train_here(monkeypatch, "--resume", killed) == 2
    assert "is in use by another training: wait for its end" in only_error(capsys.readouterr().err)
    assert tree_hash(killed) == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(killed, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "damaged"
    shutil.copytree(killed, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    before = tree_hash(run_dir)
    flags = [*TINY, "--env", "resume_envs:Forgetful-v0", "--scaling", "weak", "--run_dir", run_dir]
    assert train_here(monkeypatch, *flags, "--resume", "auto") == 2
    assert "holds checkpoints, but none is valid" in capsys.readouterr().err
    assert tree_hash(run_dir) == before


def test_output_that_nobody_reads_any_more_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with pytest.raises(BrokenPipeError):
        print("lost", flush=True)
    outlive_readers()
    print("lost, too", flush=True)


def test_ranks_that_do_not_divide_are_refused_before_anything_is_written(killed, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "strong"
    shutil.copytree(killed, run_dir)
    _rescale(run_dir)
    before = tree_hash(run_dir)
    assert train_here(monkeypatch, "--resume", run_dir, "--num_gpus", "3") == 2
    assert "do not divide over 3 ranks: try --num_gpus" in only_error(capsys.readouterr().err)
    assert tree_hash(run_dir) == before


def _rescale(run_dir):
    """Make a run with totals of a run with sizes per rank; on one rank they are the same."""
    state = load_checkpoint(latest_checkpoint(run_dir))
    state["config"] = state["config"].replace('"scaling": "weak"', '"scaling": "strong"')
    save_checkpoint(run_dir / "checkpoints", state, iteration=2, keep=3)


# ---- a disk that is full, results that are out of date


@pytest.fixture
def limits():
    """Lets the system refuse this process's longer files (None: no more): a real error, without root."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    yield limit
    limit(None)


def refused(run_dir, monkeypatch, limits, limit, *flags):
    """What a resume says that the disk refuses, and the events it tells."""
    before = {name: sha for name, sha in tree_hash(run_dir).items() if not name.startswith("rank_")}
    limits(limit)
    try:
        assert train_here(monkeypatch, "--resume", run_dir, *flags) == 1
    finally:
        limits(None)
    return before, {name: sha for name, sha in tree_hash(run_dir).items() if not name.startswith("rank_")}


@pytest.mark.parametrize("refuses", ["config.json", "metrics.jsonl"])
def test_a_disk_that_is_full_at_a_resume_costs_one_line_and_no_byte(
    refuses, killed, tmp_path, monkeypatch, capsys, limits
):
    run_dir, note = tmp_path / "run", f"cat > {tmp_path}/event"
    shutil.copytree(killed, run_dir)
    if refuses == "metrics.jsonl":  # nothing is to be changed before it
        config = json.loads((run_dir / "config.json").read_text())
        config["launch"]["on_event"] = True
        (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert (run_dir / "metrics.jsonl").stat().st_size > 2 * 1000
    before, after = refused(run_dir, monkeypatch, limits, 1000, "--on_event", note)
    assert after == before
    where = f"{run_dir}/metrics.jsonl" if refuses == "metrics.jsonl" else f"run_dir {run_dir}"
    line = only_error(capsys.readouterr().err)
    assert line == f"error: {where} cannot be written: File too large; make room, then go on with --resume"
    event = json.loads((tmp_path / "event").read_text())
    assert (event["event"], event["exit_code"], event["message"]) == ("failed", 1, line.removeprefix("error: "))
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert [record["iteration"] for record in records(run_dir)] == [1, 2, 3, 4]


def test_a_disk_that_is_full_when_a_run_is_judged_costs_one_line_and_no_training(
    killed, tmp_path, monkeypatch, capsys, limits
):
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    judge = final.judge_run
    monkeypatch.setattr(final, "judge_run", lambda *parts: (limits(2000), judge(*parts))[1])
    refused(run_dir, monkeypatch, limits, None, "--on_event", f"cat > {tmp_path}/event")
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("iteration ")]
    line = only_error("\n".join(err))
    assert "cannot be written: File too large; make room, then go on with --resume" in line
    assert json.loads((tmp_path / "event").read_text())["event"] == "failed"
    assert not (run_dir / "summary.json").exists()
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 4
    monkeypatch.undo()
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert json.loads((run_dir / "summary.json").read_text())["iteration"] == 4


def test_a_finished_run_that_goes_on_no_longer_says_that_it_has_finished(killed, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    summary = (run_dir / "summary.json").read_text()
    assert train_here(monkeypatch, "--resume", run_dir) == 0  # nothing to train: judged again
    assert (run_dir / "summary.json").read_text() == summary

    def killed_while_training(*_):
        raise ValueError("killed")

    monkeypatch.setattr(train_distributed, "train", killed_while_training)
    assert train_here(monkeypatch, "--resume", run_dir, "--total_steps", "320") == 2
    assert not (run_dir / "summary.json").exists()
    assert (run_dir / "summary.json.superseded").read_text() == summary
    assert [path.name for path in (run_dir / "plots").iterdir()] == ["learning_curve.png.superseded"]


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "2026-01-31_12-00-00")
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(fresh_directory, [tmp_path / "runs"] * 64))
    assert len(set(made)) == 64 and all(path.is_dir() for path in made)
    assert sorted(path.name for path in made)[:2] == ["2026-01-31_12-00-00", "2026-01-31_12-00-00_10"]


# ---- TensorBoard's record


def write(run_dir, iterations, factor=1.0, purge_step=1):
    """Write some iterations as one process does."""
    before = set(run_dir.glob("events.*"))
    begin(run_dir, iterations, factor, purge_step).close()
    (new,) = set(run_dir.glob("events.*")) - before  # files are read by name, which within a second is no order
    new.rename(run_dir / f"events.out.tfevents.{time.monotonic_ns():020d}")


def begin(run_dir, iterations, factor=1.0, purge_step=1):
    writer = MetricsWriter(run_dir, MAIN, total=10, unit="steps", purge_step=purge_step)
    for iteration in iterations:
        writer.write({"iteration": iteration, "global_step": 10 * iteration, "x": factor * iteration}, done=iteration)
    return writer


@pytest.mark.parametrize("marked", [False, True], ids=["no mark", "purge_step"])
def test_tensorboard_forgets_what_a_resume_undid_and_keeps_the_rest(marked, tmp_path):
    write(tmp_path, (1, 2, 3, 4))
    (first,) = tmp_path.glob("events.*")
    assert truncate_metrics(tmp_path, 2) == 2
    assert seen(tmp_path, "x") == [(10, 1.0), (20, 2.0)]  # before anything new is written
    write(tmp_path, (3,), factor=10.0, purge_step=21 if marked else None)
    assert seen(tmp_path, "x") == [(10, 1.0), (20, 2.0), (30, 30.0)]
    assert truncate_metrics(tmp_path, 2) == 2  # killed again before a new checkpoint
    write(tmp_path, (3, 4), factor=100.0, purge_step=21 if marked else None)
    assert seen(tmp_path, "x") == [(10, 1.0), (20, 2.0), (30, 300.0), (40, 400.0)]
    assert len(list(tmp_path.glob("events.*"))) == 2 and first.exists()


def test_a_torn_tensorboard_file_is_cut_where_it_is_torn(tmp_path):
    write(tmp_path, (1, 2, 3))
    (path,) = tmp_path.glob("events.*")
    whole = path.read_bytes()
    for torn in (whole[:-3], whole + whole[-20:-5], whole + bytes(100)):
        path.write_bytes(torn)
        assert truncate_metrics(tmp_path, 3) == 3
        assert whole.startswith(path.read_bytes()) and len(whole) - path.stat().st_size < 60
        write(tmp_path, (4,), purge_step=31)
        assert [step for step, _ in seen(tmp_path, "x")][-2:] == [30 if torn != whole[:-3] else 20, 40]
        truncate_metrics(tmp_path, 3)


def test_a_run_that_begins_anew_leaves_no_event_of_its_past(tmp_path):
    write(tmp_path, (1, 2))
    assert truncate_metrics(tmp_path, 0) == 0
    assert not list(tmp_path.glob("events.*"))


def test_what_is_flushed_outlives_a_writer_that_is_never_closed(tmp_path, monkeypatch):
    write_record = RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda self, data: (time.sleep(0.02), write_record(self, data)))
    writer = begin(tmp_path / "run", range(1, 21))  # TensorBoard's thread cannot keep up with this
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # what a kill at this moment would leave
    assert seen(tmp_path / "copy", "x") == [(10 * i, float(i)) for i in range(1, 21)]
    assert len(records(tmp_path / "copy")) == 20
    writer.close()


def test_lost_metrics_do_not_cut_the_tensorboard_record(tmp_path):
    write(tmp_path, (1, 2))
    (tmp_path / "metrics.jsonl").write_text("")
    assert truncate_metrics(tmp_path, 2) == 0
    assert len(seen(tmp_path, "x")) == 2


def test_the_hash_in_the_summary_is_of_the_final_parameters(killed, tmp_path, monkeypatch):
    shutil.copytree(killed, tmp_path / "run")
    assert train_here(monkeypatch, "--resume", tmp_path / "run", "--total_steps", "192") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    state = result_of(tmp_path / "run")
    digest = hashlib.sha256()
    for name, tensor in state.items():
        if name.startswith("policy/"):
            digest.update(tensor.contiguous().numpy().tobytes())
    assert summary["iteration"] == 3 and summary["parameter_sha256"] == digest.hexdigest()


def test_a_run_directory_closed_to_this_user_is_one_line(killed, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "summary.json"))

    monkeypatch.setattr(train_distributed, "set_results_aside", refuse)
    assert train_here(monkeypatch, "--resume", run_dir) == 2
    assert "Permission denied" in only_error(capsys.readouterr().err)
