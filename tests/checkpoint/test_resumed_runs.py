"""Runs resume from the newest valid checkpoint, and survive a full disk."""

import shutil

from hostile import damage
from train_runs import RECALL, evaluate_here, printed_error, train_here

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import MetricsWriter


def test_the_best_checkpoint_is_loaded_if_all_others_are_damaged(copy, capsys):
    for path in copy.glob("checkpoints/iteration_*.pt"):
        damage(path)
    best = copy / "checkpoints" / "best.pt"
    assert latest_checkpoint(copy) == best
    assert evaluate_here(best, "--episodes=2") == 0
    best.write_bytes(b"")
    assert train_here("--resume", copy) == 2
    assert str(copy) in printed_error(capsys)


def test_a_failed_run_does_not_delete_a_new_run_in_its_directory(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    write = MetricsWriter.write

    def replace_first(writer, record, *, done):
        run_dir.rename(tmp_path / "moved")
        run_dir.mkdir()
        (run_dir / "config.json").write_text("of another run")
        write(writer, record, done=done)

    monkeypatch.setattr(MetricsWriter, "write", replace_first)
    flags = [*RECALL, "--eval_episodes=2", "--total_steps=640"]
    assert train_here(*flags, "--run_dir", run_dir) == 1
    assert str(run_dir) in printed_error(capsys)
    assert [path.read_text() for path in run_dir.iterdir()] == ["of another run"]


def test_a_run_on_a_full_disk_continues_without_a_traceback(small_disk, capsys):
    """The whole run directory is on the full disk, not only the checkpoints."""
    run_dir = small_disk("160k") / "run"
    flags = [*RECALL, "--checkpoint_every=1", "--eval_episodes=2", "--total_steps", 64 * 8]
    flags += ["--validate_every=0", "--on_save_error=continue", "--run_dir", run_dir]
    code = train_here(*flags)
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" not in err and "Logging error" not in err, err
    # All saves from iteration 3 to 8 fail. Each failure is a warning, except the last one: it is an
    # error, because no later save can make up for it.
    assert err.count("cannot write checkpoint") == 6
    assert err.splitlines()[-1].startswith("error: cannot write checkpoint "), err
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 2


def test_a_finished_run_of_which_only_the_checkpoints_are_left_is_evaluated(copy, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(copy / "checkpoints", kept / "checkpoints")
    assert train_here("--resume", kept) == 0
    assert RunDir(kept).summary()["test"] == RunDir(copy).summary()["test"]


def test_restarts_that_would_replace_a_batch_of_environments_are_refused(copy, capsys):
    assert train_here("--resume", copy, "--env_restarts=1") == 2
    assert "--env_restarts" in printed_error(capsys)
