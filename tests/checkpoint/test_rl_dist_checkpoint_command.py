"""Falling back to the newest valid checkpoint, and the command that looks at checkpoints."""

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
from train_runs import RECALL, evaluate_here, only_error, records, train_here

from rl_dist.checkpoint import command as checkpoint
from rl_dist.checkpoint.file import load_checkpoint, read_checkpoint
from rl_dist.checkpoint.folder import latest_checkpoint

TINY = [*RECALL, "--checkpoint_every", 1, "--eval_episodes", 2]


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three iterations with validation after each."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    flags = ["--total_steps", 192, "--validate_every", 1, "--run_dir", run_dir]
    with pytest.MonkeyPatch.context() as patch:
        assert train_here(patch, *TINY, *flags) == 0
    return run_dir


@pytest.fixture
def copied(finished, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(finished, tmp_path / "runs" / "run")


def without_pytests_handlers(monkeypatch):
    """Warnings reach stderr as they do for users."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def damage(run_dir, iteration):
    path = Path(run_dir, "checkpoints", f"iteration_{iteration:08d}.pt")
    data = path.read_bytes()
    path.unlink()  # best.pt may be a hard link to it
    path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    return f"skipped: checkpoint {path} is damaged: its bytes do not match its SHA-256 checksum"


@pytest.mark.parametrize("auto", [False, True], ids=["run_dir", "auto"])
def test_resume_goes_on_from_the_newest_valid_one_and_says_what_it_skipped(
    copied, auto, monkeypatch, capsys
):
    monkeypatch.chdir(copied.parents[1])
    without_pytests_handlers(monkeypatch)
    run_dir = Path("runs/run") if auto else copied
    skipped = [damage(run_dir, 3), damage(run_dir, 2)]
    assert train_here(monkeypatch, "--resume", "auto" if auto else run_dir) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith("skipped")] == skipped  # once each
    assert f"going on from {run_dir}/checkpoints/iteration_00000001.pt" in out
    assert [line["iteration"] for line in records(run_dir)] == [1, 2, 3]
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 3


def test_the_best_is_the_last_resort(copied, monkeypatch, capsys):
    without_pytests_handlers(monkeypatch)
    for iteration in (1, 2, 3):
        damage(copied, iteration)
    assert latest_checkpoint(copied) == copied / "checkpoints" / "best.pt"
    (copied / "checkpoints" / "best.pt").write_bytes(b"")
    assert train_here(monkeypatch, "--resume", copied) == 2
    *skipped, last = capsys.readouterr().err.splitlines()
    assert len(skipped) == 4 and "best.pt is empty" in skipped[3]
    assert last == f"error: {copied} holds no valid checkpoint: give a run directory or a .pt file"


def test_the_best_checkpoint_can_be_evaluated(finished, monkeypatch, capsys):
    best = finished / "checkpoints" / "best.pt"
    assert evaluate_here(monkeypatch, best, "--episodes", 2) == 0
    assert f"{best}, iteration {load_checkpoint(best)['iteration']}" in capsys.readouterr().out


def command(*argv):
    try:
        return checkpoint.main([str(word) for word in argv])
    except SystemExit as leaving:
        return leaving.code


def test_a_run_on_a_full_disk_goes_on_without_a_traceback(small_disk, monkeypatch, capsys):
    """The whole run directory is on the full disk, not the checkpoints alone."""
    run_dir = small_disk("140k") / "run"
    flags = ["--total_steps", 64 * 8, "--validate_every", 0, "--on_save_error", "continue"]
    code = train_here(monkeypatch, *TINY, *flags, "--run_dir", run_dir)
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" not in err and "Logging error" not in err, err
    # iterations 3 to 7; the last save must succeed
    assert err.count("training goes on without") == 5 and "No space left" in err
    assert err.splitlines()[-1].startswith("error: cannot write checkpoint "), err
    assert names(run_dir) == ["iteration_00000001.pt", "iteration_00000002.pt"]
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 2


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/iteration_00000003.pt"])
def test_verify_says_of_every_file_whether_it_is_whole(copied, where, capsys):
    files = ["iteration_00000003.pt"] if where.endswith("pt") else [*names(copied)[1:], "best.pt"]
    assert command("verify", copied / where) == 0
    lines = capsys.readouterr().out.splitlines()
    valid = [f"valid    {copied}/checkpoints/{name}" for name in files]
    assert [line.split(":")[0] for line in lines] == valid
    assert "iteration_00000003.pt: iteration 3, steps 192, episodes " in "\n".join(lines)
    cause = damage(copied, 3).removeprefix("skipped: ")
    assert command("verify", copied / where) == 1
    again = capsys.readouterr().out.splitlines()
    assert len(again) == len(files) and f"damaged  {cause}" in again


def test_list_shows_the_newest_first_what_is_damaged_and_the_best(copied, capsys):
    best = load_checkpoint(copied / "checkpoints" / "best.pt")
    iteration = best["iteration"]
    mark = f" valid, best: valid/return {best['measured']['valid/return']:.6g}"
    broken = 3 if iteration != 3 else 2
    damage(copied, broken)
    os.utime(copied / "checkpoints" / "iteration_00000001.pt", (1e9, 1e9))
    assert command("list", copied) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["3", "2", "1"]  # best.pt is one of them
    for number, row in zip((3, 2, 1), rows, strict=True):
        assert f"iteration_0000000{number}.pt" in row
        assert ("is damaged: its bytes" in row) == (number == broken)
        assert row.endswith(mark) == (number == iteration)
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9)) in rows[2]
    (copied / "checkpoints" / f"iteration_{iteration:08d}.pt").unlink()
    assert command("list", copied / "checkpoints") == 0
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if row.split()[0] == str(iteration)]
    assert "best.pt" in row and row.endswith(mark)


def test_inspect_tells_what_a_checkpoint_holds(finished, capsys):
    newest = latest_checkpoint(finished)
    found = read_checkpoint(newest)
    assert command("inspect", finished) == 0
    text = " ".join(capsys.readouterr().out.split())
    facts = [f"path {newest}", "format_version 2", f"sha256 {found.sha256}", "iteration 3"]
    for words in [*facts, "steps 192", "num_envs 4, num_steps 16", "policy/critic_head.bias"]:
        assert words in text
    assert command("inspect", newest, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["config"] == json.loads(found.state["config"])
    assert about["bytes"] == newest.stat().st_size
    bias = {"name": "policy/critic_head.bias", "shape": [1], "type": "float32"}
    assert bias in about["tensors"] and len(about["tensors"]) > 50
    assert (about["iteration"], about["steps"]) == (3, 192)
    assert about["episodes"] == found.state["episodes"]


def test_inspect_of_a_run_takes_the_newest_valid_one_and_of_a_damaged_file_says_so(
    copied, monkeypatch, capsys
):
    without_pytests_handlers(monkeypatch)
    damage(copied, 3)
    assert command("inspect", copied) == 0
    out, err = capsys.readouterr()
    assert "iteration_00000002.pt" in out and err.startswith("skipped: ")
    assert command("inspect", copied / "checkpoints" / "iteration_00000003.pt") == 1
    assert "do not match" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["verify"], "required: PATH"),
        (["look", "x"], "invalid choice"),
        (["list", "no_such"], "no_such does not exist: give a checkpoint file, a folder"),
        (["verify", "empty"], "empty holds no checkpoints"),
        (["verify", "empty", "--json"], "unrecognized arguments: --json"),
    ],
)
def test_bad_usage_of_the_command_is_one_line(argv, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert command(*argv) == 2
    assert expected in only_error(capsys.readouterr().err)
