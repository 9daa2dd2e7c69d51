"""Falling back to the newest valid checkpoint, and the command that looks at checkpoints."""

import json
import logging
from pathlib import Path

import pytest
from train_runs import RECALL, evaluate_here, only_error, records, train_here

from rl_dist.checkpoint import __main__ as checkpoint
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, read_checkpoint


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def without_pytests_handlers(monkeypatch):
    """Warnings reach stderr as they do for users."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def damage(run_dir, iteration):
    path = Path(run_dir, "checkpoints", f"iteration_{iteration:08d}.pt")
    data = path.read_bytes()
    path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    return path


@pytest.mark.parametrize("auto", [False, True], ids=["run_dir", "auto"])
def test_resume_goes_on_from_the_newest_valid_one_and_says_what_it_skipped(
    copy, auto, monkeypatch, capsys
):
    without_pytests_handlers(monkeypatch)
    monkeypatch.chdir(copy.parent)
    run_dir = copy
    if auto:
        Path("runs").mkdir()
        run_dir = copy.rename("runs/run")
    skipped = [damage(run_dir, 3), damage(run_dir, 2)]
    assert train_here(monkeypatch, "--resume", "auto" if auto else run_dir) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("skipped")]
    assert len(lines) == 2  # once each
    assert all(str(path) in line for path, line in zip(skipped, lines, strict=True))
    assert f"going on from {run_dir}/checkpoints/iteration_00000001.pt" in out
    assert [line["iteration"] for line in records(run_dir)] == [1, 2, 3]
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 3


def test_the_best_is_the_last_resort(copy, monkeypatch, capsys):
    without_pytests_handlers(monkeypatch)
    for iteration in (1, 2, 3):
        damage(copy, iteration)
    best = copy / "checkpoints" / "best.pt"
    assert latest_checkpoint(copy) == best
    assert evaluate_here(monkeypatch, best, "--episodes", 2) == 0
    assert f"{best}, iteration " in capsys.readouterr().out
    best.write_bytes(b"")
    assert train_here(monkeypatch, "--resume", copy) == 2
    *skipped, last = capsys.readouterr().err.splitlines()
    assert len(skipped) == 1 and "best.pt is empty" in skipped[0]  # the others were named before
    assert "no valid checkpoint" in last


def test_a_run_on_a_full_disk_goes_on_without_a_traceback(small_disk, monkeypatch, capsys):
    """The whole run directory is on the full disk, not the checkpoints alone."""
    run_dir = small_disk("140k") / "run"
    flags = [*RECALL, "--checkpoint_every", 1, "--eval_episodes", 2, "--total_steps", 64 * 8]
    flags += ["--validate_every", 0, "--on_save_error", "continue", "--run_dir", run_dir]
    code = train_here(monkeypatch, *flags)
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" not in err and "Logging error" not in err, err
    # iterations 3 to 7; the last save must succeed
    assert err.count("training goes on without") == 5 and "No space left" in err
    assert err.splitlines()[-1].startswith("error: cannot write checkpoint "), err
    assert names(run_dir) == ["iteration_00000001.pt", "iteration_00000002.pt"]
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 2


# ---- the command


def command(*argv):
    try:
        return checkpoint.main([str(word) for word in argv])
    except SystemExit as leaving:
        return leaving.code


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/iteration_00000003.pt"])
def test_verify_and_list_say_of_every_file_whether_it_is_whole(copy, where, capsys):
    files = ["iteration_00000003.pt"]
    if not where.endswith("pt"):
        files += ["iteration_00000002.pt", "iteration_00000001.pt", "best.pt"]

    def rows(word, code):
        assert command(word, copy / where) == code
        return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]

    found = rows("verify", 0)
    assert [row[4] for row in found] == files and all(row[5].startswith("valid") for row in found)
    assert found[0][0] == "3" and found[-1][6] == "valid/return" or len(files) == 1
    damage(copy, 3)
    assert rows("verify", 1)[0][5] == rows("list", 0)[0][5] == "damaged:"


def test_inspect_shows_what_a_checkpoint_holds(trained, capsys):
    newest = latest_checkpoint(trained)
    state, facts = read_checkpoint(newest)
    assert command("inspect", trained) == 0
    text = " ".join(capsys.readouterr().out.split())
    facts = [f"path {newest}", "format_version 4", f"sha256 {facts['sha256']}", "iteration 3"]
    for words in [*facts, "steps 192", "'num_envs': 4, 'num_steps': 16", "policy/critic_head.bias"]:
        assert words in text
    assert command("inspect", newest, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["config"] == json.loads(state["config"])
    assert about["bytes"] == newest.stat().st_size and about["steps"] == 192
    bias = {"name": "policy/critic_head.bias", "shape": [1], "type": "float32"}
    assert bias in about["tensors"] and len(about["tensors"]) > 50


def test_inspect_of_a_run_takes_the_newest_valid_one_and_of_a_damaged_file_says_so(
    copy, monkeypatch, capsys
):
    without_pytests_handlers(monkeypatch)
    damaged = damage(copy, 3)
    assert command("inspect", copy) == 0
    assert "iteration_00000002.pt" in capsys.readouterr().out
    assert command("inspect", damaged) == 1
    assert "do not match" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["verify"], "PATH"),
        (["look", "x"], "invalid choice"),
        (["list", "no_such"], "no_such does not exist"),
        (["verify", "empty"], "empty holds no checkpoints"),
    ],
)
def test_bad_usage_of_the_command_is_one_line(argv, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert command(*argv) == 2
    assert expected in only_error(capsys.readouterr().err)
