"""A killed run resumes without gaps; a refused resume changes no file."""

import hashlib
import os
import shutil
import sys

import pytest
from gymnasium import spaces
from hostile import setting
from misbehaving_envs import Misbehaving
from train_runs import RECALL, iterations, only_error, printed_error, records, train_here

from agents import rank
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import outlive_readers
from rl_dist.files import read_object
from rl_dist.resume_check import differences, result_of
from rl_dist.run_dir import RunDir
from rl_dist.telemetry import loggers

TINY = [*RECALL, "--eval_episodes=2", "--total_steps=256"]
TINY += ["--env=misbehaving_envs:Misbehaving-v0", "--scaling=weak"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return a run that looks as if it had been killed after iteration 2 of 4.

    Its checkpoints do not contain the state of the environments, which cannot be saved.
    """
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    flags = [*TINY, "--checkpoint_every=2", "--run_dir", run_dir]
    assert train_here(*flags) == 0
    (run_dir / "checkpoints" / "iteration_00000004.pt").unlink()
    (run_dir / "summary.json").unlink()
    return run_dir


@pytest.fixture
def run_dir(killed, tmp_path):
    """Return a copy of the `killed` run."""
    return shutil.copytree(killed, tmp_path / "run")


def tree_hash(folder, without=()):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: sha for name, sha in hashes.items() if name not in without}


@pytest.fixture
def refusal(capsys):
    """Return a function that tries a resume and returns the error that refuses it.

    The refused resume must not change any file of the run.
    """

    def resume(run_dir, *flags, resume=None):
        before = tree_hash(run_dir)
        assert train_here("--resume", resume or run_dir, *flags) == 2
        assert tree_hash(run_dir) == before
        return printed_error(capsys)

    return resume


# ---- environments whose state cannot be saved


def test_an_environment_without_snapshots_is_announced_and_resumes_deterministically(
    killed, tmp_path, capsys
):
    once, again = tmp_path / "once", tmp_path / "again"
    for run_dir in (once, again):
        shutil.copytree(killed, run_dir)
        assert train_here("--resume", run_dir) == 0
        assert "Misbehaving-v0 cannot be snapshotted" in capsys.readouterr().out
    assert differences(result_of(once), result_of(again)) == []
    assert records(once)[:2] == records(killed)[:2]
    assert iterations(once) == [1, 2, 3, 4]
    # the resumed run draws new episodes
    assert records(once)[2]["loss/value"] != records(killed)[2]["loss/value"]


# ---- changed settings are refused, and no file is touched


def test_all_differences_are_named_in_one_line_and_nothing_is_overwritten(
    killed, refusal, monkeypatch
):
    flags = ["--seed=2", "--env=CartPole-v1", "--hidden_size=16", "--learning_rate=1"]
    line = refusal(killed, *flags)
    for name, now, saved in (
        ("env", "CartPole-v1", "misbehaving_envs:Misbehaving-v0"),
        ("seed", 2, 1),
        ("hidden_size", 16, 8),
        ("learning_rate", 1.0, 0.0007),
    ):
        assert f"--{name} {now} (the checkpoint has {saved})" in line
    changes = {"action_space": spaces.Discrete(5), "observation_space": spaces.Box(0.0, 1.0, (3,))}
    for name, space in changes.items():
        monkeypatch.setattr(Misbehaving, name, space)
    assert "num_actions 5 (the checkpoint has 2), num_obs 3 (the checkpoint has 2)" in refusal(
        killed
    )


@pytest.mark.parametrize("flags", [["--run_dir", "x"], ["--preset", "paper"], ["--quick"]])
def test_flags_that_a_resume_would_ignore_are_refused_by_name(flags, killed, refusal):
    assert flags[0] in refusal(killed, *flags)


def test_a_checkpoint_of_another_run_is_not_followed(run_dir, refusal):
    setting(run_dir, "train", "seed", 2, config=False)
    assert "seed 1 (the checkpoint has 2)" in refusal(run_dir)


def test_a_run_in_use_or_without_a_valid_checkpoint_is_not_touched(run_dir, monkeypatch, refusal):
    monkeypatch.setattr(RunDir.hold, "__defaults__", (0.3,))
    with RunDir(run_dir).hold():
        assert "is in use by another training" in refusal(run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    line = refusal(run_dir, *TINY, "--run_dir", run_dir, resume="auto")
    assert "holds no valid checkpoint" in line


def raise_error(*_, **__):
    raise ValueError("no licence")


@pytest.mark.parametrize("flags", [["--callback=no_such:call"], ["--loggers=json"], []])
def test_a_resume_refused_by_users_code_leaves_the_run_as_it_was(flags, run_dir, monkeypatch):
    before = tree_hash(run_dir, without={"rank_0.log"})
    with monkeypatch.context() as patch:
        patch.setitem(loggers.LOGGERS, "json", raise_error)
        if not flags:  # the environment refuses
            patch.setattr(Misbehaving, "reset", raise_error)
        assert train_here("--resume", run_dir, *flags) in (1, 2)
    assert tree_hash(run_dir, without={"rank_0.log"}) == before
    assert train_here("--resume", run_dir) == 0


def test_output_to_a_closed_pipe_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with pytest.raises(BrokenPipeError):
        print("lost", flush=True)
    outlive_readers()
    print("lost, too" * 10_000, flush=True)  # more text than fits into a buffer


# ---- a full disk, and outdated results


def train_on_full_disk(run_dir, limits, capsys, *flags):
    """Resume a run whose disk is full until it ends; return the only error line."""
    assert train_here("--resume", run_dir, *flags) == 1
    limits(None)
    lines = capsys.readouterr().err.splitlines()
    line = only_error("\n".join(line for line in lines if not line.startswith("iteration ")))
    assert f"error: {run_dir}" in line and "cannot be written: File too large" in line
    return line


def assert_run_continues(run_dir):
    assert train_here("--resume", run_dir) == 0
    assert iterations(run_dir) == [1, 2, 3, 4]
    assert RunDir(run_dir).summary()["iteration"] == 4


def test_a_run_that_cannot_start_on_a_full_disk_changes_no_file(run_dir, capsys, limits):
    before = tree_hash(run_dir, without={"rank_0.log"})
    limits(1000)
    train_on_full_disk(run_dir, limits, capsys)
    assert tree_hash(run_dir, without={"rank_0.log"}) == before
    assert_run_continues(run_dir)


def test_a_summary_that_does_not_fit_on_the_disk_fails_and_is_written_later(
    run_dir, tmp_path, monkeypatch, capsys, limits
):
    write, large = RunDir.write_summary, {"filler": "x" * 2000}
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_summary", lambda run, _: (limits(2000), write(run, large)))
        line = train_on_full_disk(run_dir, limits, capsys, "--on_event", f"cat > {tmp_path}/event")
    event = read_object(tmp_path / "event")
    assert (event["event"], event["exit_code"]) == ("failed", 1) and event["message"] in line
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 4
    assert not (run_dir / "summary.json").exists()
    assert_run_continues(run_dir)


def test_a_finished_run_that_continues_deletes_its_summary(run_dir, monkeypatch):
    assert train_here("--resume", run_dir) == 0
    summary = (run_dir / "summary.json").read_text()
    # This resume does not train; it only evaluates again.
    assert train_here("--resume", run_dir) == 0
    assert (run_dir / "summary.json").read_text() == summary

    def killed_while_training(*_, **__):
        raise ValueError("killed")

    monkeypatch.setattr(rank, "train", killed_while_training)
    assert train_here("--resume", run_dir, "--total_steps=320") == 2
    assert not (run_dir / "summary.json").exists()
