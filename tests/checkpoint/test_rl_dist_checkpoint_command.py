"""Falling back to the newest valid checkpoint, and the command that looks at checkpoints."""

import json
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from train_runs import evaluate_here, only_error, records, train_here

from rl_dist.checkpoint import command as checkpoint
from rl_dist.checkpoint.file import load_checkpoint, read_checkpoint
from rl_dist.checkpoint.folder import latest_checkpoint

TINY = [
    *("--env", "Recall-v0", "--num_envs", 4, "--num_steps", 16, "--bptt_steps", 8, "--batch_size", 4),
    *("--hidden_size", 8, "--checkpoint_every", 1, "--eval_episodes", 2, "--device", "cpu"),
]


def names(run_dir):
    return sorted(os.listdir(Path(run_dir, "checkpoints")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three iterations with validation after each."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert train_here(patch, *TINY, "--total_steps", 192, "--validate_every", 1, "--run_dir", run_dir) == 0
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
def test_resume_goes_on_from_the_newest_valid_one_and_says_what_it_skipped(copied, auto, monkeypatch, capsys):
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


def test_the_best_checkpoint_can_be_judged(finished, monkeypatch, capsys):
    best = finished / "checkpoints" / "best.pt"
    assert evaluate_here(monkeypatch, best, "--episodes", 2) == 0
    out = capsys.readouterr().out
    assert f"{best}, iteration {load_checkpoint(best)['iteration']}" in out and "2 episodes without noise" in out


def command(*argv):
    try:
        return checkpoint.main([str(word) for word in argv])
    except SystemExit as leaving:
        return leaving.code


def test_a_run_on_a_full_disk_goes_on_without_a_traceback(tmp_path, monkeypatch, capsys):
    """The whole run directory is on the full disk, not the checkpoints alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=140k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        flags = ["--total_steps", 64 * 8, "--validate_every", 0, "--on_save_error", "continue"]
        code = train_here(monkeypatch, *TINY, *flags, "--run_dir", disk / "run")
        err = capsys.readouterr().err
        assert code == 1 and "Traceback" not in err and "Logging error" not in err, err
        assert err.count("training goes on without") == 5  # iterations 3 to 7; the last save must succeed
        assert err.splitlines()[-1].startswith("error: cannot write checkpoint ") and "No space left" in err, err
        assert names(disk / "run") == ["iteration_00000001.pt", "iteration_00000002.pt"]
        assert load_checkpoint(latest_checkpoint(disk / "run"))["iteration"] == 2
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/iteration_00000003.pt"])
def test_verify_says_of_every_file_whether_it_is_whole(copied, where, capsys):
    files = ["iteration_00000003.pt"] if where.endswith("pt") else [*names(copied)[1:], "best.pt"]
    assert command("verify", copied / where) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"valid    {copied}/checkpoints/{name}" for name in files]
    assert "iteration_00000003.pt: iteration 3, steps 192, episodes " in "\n".join(lines)
    cause = damage(copied, 3).removeprefix("skipped: ")
    assert command("verify", copied / where) == 1
    again = capsys.readouterr().out.splitlines()
    assert len(again) == len(files) and f"damaged  {cause}" in again


def test_verify_looks_at_superseded_ones_too(copied, capsys):
    old = copied / "checkpoints" / "iteration_00000009.pt.superseded"
    old.write_bytes(b"PK")
    assert command("verify", copied) == 1
    assert f"damaged  checkpoint {old} is " in capsys.readouterr().out


def test_list_shows_the_newest_first_what_is_damaged_and_the_best(copied, capsys):
    best = load_checkpoint(copied / "checkpoints" / "best.pt")
    iteration, measured = best["iteration"], best["measured"]
    broken = 3 if iteration != 3 else 2
    damage(copied, broken)
    os.utime(copied / "checkpoints" / "iteration_00000001.pt", (1e9, 1e9))
    assert command("list", copied) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["3", "2", "1"]  # best.pt is one of them
    for number, row in zip((3, 2, 1), rows, strict=True):
        assert f"iteration_0000000{number}.pt" in row
        assert ("is damaged: its bytes" in row) == (number == broken)
        assert row.endswith(f" valid, best: valid/return {measured['valid/return']:.6g}") == (number == iteration)
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9)) in rows[2]
    (copied / "checkpoints" / f"iteration_{iteration:08d}.pt").unlink()
    assert command("list", copied / "checkpoints") == 0
    (row,) = [row for row in capsys.readouterr().out.splitlines() if row.split()[0] == str(iteration)]
    assert "best.pt" in row and f" valid, best: valid/return {measured['valid/return']:.6g}" in row


def test_inspect_tells_what_a_checkpoint_holds(finished, capsys):
    newest = latest_checkpoint(finished)
    found = read_checkpoint(newest)
    assert command("inspect", finished) == 0
    text = capsys.readouterr().out
    for line in (f"path {newest}", "format_version 2", f"sha256 {found.sha256}", "iteration 3", "steps 192"):
        assert line in " ".join(text.split())
    assert "num_envs 4, num_steps 16" in " ".join(text.split()) and "policy/critic_head.bias" in text
    assert command("inspect", newest, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["config"] == json.loads(found.state["config"]) and about["bytes"] == newest.stat().st_size
    bias = {"name": "policy/critic_head.bias", "shape": [1], "type": "float32"}
    assert bias in about["tensors"] and len(about["tensors"]) > 50
    assert (about["iteration"], about["steps"], about["episodes"]) == (3, 192, found.state["episodes"])


def test_inspect_of_a_run_takes_the_newest_valid_one_and_of_a_damaged_file_says_so(copied, monkeypatch, capsys):
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
        (["list", "no_such"], "no_such does not exist: give a checkpoint file, a folder of them or a run directory"),
        (["verify", "empty"], "empty holds no checkpoints"),
        (["verify", "empty", "--json"], "unrecognized arguments: --json"),
    ],
)
def test_bad_usage_of_the_command_is_one_line(argv, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert command(*argv) == 2
    assert expected in only_error(capsys.readouterr().err)


@pytest.mark.parametrize("argv", [["--help"], ["verify", "--help"], ["inspect", "--help"]])
def test_help_has_examples(argv, capsys):
    assert command(*argv) == 0
    assert "python -m rl_dist.checkpoint inspect runs/my_run" in capsys.readouterr().out
