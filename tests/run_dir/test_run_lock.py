"""The lock of a run is held from the choice of a checkpoint until all ranks end."""

import multiprocessing

import pytest
from lock_keeper import keep
from train_runs import RECALL, iterations, only_error, start_training

from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir

SMALL = [*RECALL, "--num_steps=8", "--eval_episodes=2", "--checkpoint_every=1"]


def test_a_lock_passed_to_a_child_process_is_held_until_both_have_released_it(tmp_path):
    run = RunDir(tmp_path).hold()
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    child = spawn.Process(target=keep, args=(run, done))
    child.start()
    run.release()
    assert run.is_locked()
    done.set()
    child.join()
    assert child.exitcode == 0 and not run.is_locked()


def test_two_runs_cannot_start_in_one_directory_unless_the_first_was_removed(tmp_path):
    with RunDir(tmp_path).hold_new(), pytest.raises(UserError, match="in use"):
        RunDir(tmp_path).hold_new()
    with RunDir(tmp_path).hold_new() as run:
        run.write_config({})
    with pytest.raises(UserError, match="already contains a run"):
        RunDir(tmp_path).hold_new()
    with RunDir(tmp_path).hold() as first:
        first.config_path.unlink()
        with RunDir(tmp_path).hold(patience_s=0.0) as second:
            assert second.is_in_place() and not first.is_in_place()


def test_a_shorter_configuration_replaces_a_longer_one(tmp_path):
    with RunDir(tmp_path).hold_new() as run:
        for content in ({"note": "x" * 100}, {"note": ""}):
            run.write_config(content)
            assert run.config() == content


def test_a_configuration_that_does_not_fit_the_disk_keeps_the_old_one(tmp_path, limits):
    with RunDir(tmp_path).hold_new() as run:
        run.write_config({"note": "old"})
        limits(200)
        with pytest.raises(UserError, match=r"config\.json"):
            run.write_config({"note": "x" * 1000})
        assert run.config() == {"note": "old"}


def test_a_failed_start_removes_only_its_own_files(tmp_path):
    theirs = tmp_path / "data" / "prices.csv"
    theirs.parent.mkdir()
    theirs.touch()
    with RunDir(tmp_path).hold_new() as run:  # --resume auto does this in a folder without a run
        run.write_config({})
        run.discard_unstarted(2)
    assert [*tmp_path.rglob("*.*")] == [theirs]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_simultaneous_starts_and_resumes_repeat_no_iteration(ranks, tmp_path):
    flags = [*SMALL, "--num_gpus", ranks, "--run_dir", tmp_path]
    begun = [start_training(*flags, "--total_steps=128") for _ in range(2)]
    run, is_locked, times_free = RunDir(tmp_path), False, 0
    while any(job.poll() is None for job in begun):
        is_locked = run.is_locked() or is_locked
        times_free += is_locked and not run.is_locked() and not run.summary()
    ended = [(job.communicate(timeout=120), job.returncode) for job in begun]
    assert sorted(code for _, code in ended) == [0, 2] and is_locked and not times_free
    only_error(next(err for (_, err), code in ended if code == 2))
    more = [start_training("--resume", tmp_path, "--total_steps=640") for _ in range(2)]
    for job in more:  # the second job waits, then finds a finished run
        assert (job.communicate(timeout=120), job.returncode)[1] in (0, 2)
    assert iterations(tmp_path) == list(range(1, 21))
