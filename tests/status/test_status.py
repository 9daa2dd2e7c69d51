"""The status command: what it shows of runs, and how it follows one to its end."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_run_state import Run, message, record
from train_runs import PATIENCE_S, RECALL, REPO, only_error, records, start_training, wait_until

from rl_dist import status
from rl_dist.run_dir import RunDir
from rl_dist.status import read_status

FAST = ["--every", "0.1"]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_a_running_one_is_shown_with_all_there_is(run, capsys):
    gpu = {"utilization_percent": 87, "memory_allocated_gib": 1.5, "memory_peak_gib": 2.25}
    gpu |= {"memory_free_gib": 70, "temperature_c": 61, "power_w": 250}
    one = {"rank": 0, "cpu/percent": 99.0, "ram/used_gib": 0.5, "time/idle_share": 0.25}
    one |= {f"gpu/{name}": value for name, value in gpu.items()}
    figures = {"episode/return": 0.5, "episode/count": 1, "valid/sharpe": 1.25}
    run.metrics(record(1), record(2, ranks=[one, {"rank": 1}], **figures))
    run.logs(message(30, 0))
    with RunDir(run.path).hold():
        assert status.main([str(run.path)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["state"] == "running" and rows["checkpoint"] == "none"
    assert rows["job"] == "Recall-v0, 2 ranks on cpu, strategy ddp"
    assert rows["progress"] == "iteration 2, 2 of 100 episodes (2%)"
    for words in ("100.0 steps/s", "0.1 s an iteration"):
        assert words in rows["speed"]
    assert "return 0.5" in rows["return"] and "valid/sharpe 1.25" in rows["return"]
    for words in ("CPU 99 %", "0.50 GiB", "GPU 87 %", "peak 2.25 GiB", "250 W", "waits 25%"):
        assert words in rows["rank"]
    assert rows["logged"].endswith("warning, rank 0: number 30")


@pytest.mark.parametrize(
    ("phase", "exit_code", "code", "state"),
    [("stopped", 143, 0, "stopped"), ("failed", 1, 1, "failed"), ("training", None, 1, "dead")],
)
def test_the_exit_code_says_whether_it_went_wrong(phase, exit_code, code, state, run, capsys):
    run.state(phase, exit_code, "why")
    for more in ([], ["--follow"]):  # it is over: nothing to wait for
        assert status.main([str(run.path), *more]) == code
        assert f"state       {state}:" in capsys.readouterr().out
    assert status.main([str(run.path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["state"] == state


def test_without_a_directory_the_newest_run_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert status.main([]) == 2
    assert "there is no run in runs/" in only_error(capsys.readouterr().err)
    (tmp_path / "runs").mkdir()
    Run(tmp_path / "runs" / "mine").state("done", 0)
    assert status.main([]) == 0
    assert "runs/mine" in capsys.readouterr().out


@pytest.mark.parametrize("argv", ["x --every 0", "x --follow --every 0", "x --follow --every nan"])
def test_bad_usage_is_one_line_and_code_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        status.main(argv.split())
    assert left.value.code == 2 and "--every" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize("terminal", [False, True])
def test_following_shows_each_change_until_the_end(run, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    lock = RunDir(run.path).hold()
    run.metrics(record(1))
    left = [2, 3, 4]

    def go_on(every_s):
        iteration = left.pop(0)
        run.metrics(*(record(number) for number in range(1, iteration + 1)))
        if not left:
            run.state("done", 0)
            lock.release()

    monkeypatch.setattr("time.sleep", go_on)
    assert status.main([str(run.path), "--follow"]) == 0
    out = capsys.readouterr().out
    if terminal:  # each in place of the one before
        assert out.count("\x1b[H\x1b[2J") == out.count("state  ") == 4
    else:
        running = [line for line in out.splitlines() if " | running | " in line]
        shown = [line.split(" | ")[2].partition(",")[0] for line in running]
        assert shown == [f"iteration {n}" for n in (1, 2, 3)]
        assert "100.0 steps/s" in running[-1] and "0:00:10 without" in running[-1]
    assert "state       finished" in out


@pytest.mark.slow
def test_a_real_run_is_watched_killed_and_found_dead(tmp_path):
    run_dir = tmp_path / "run"
    flags = [*RECALL, "--total_steps", 10**8, "--num_gpus", 2, "--monitor_every", 0.05]
    flags += ["--validate_every", 0, "--checkpoint_every", 2]
    job = start_training(*flags, "--run_dir", run_dir)
    try:
        wait_until((run_dir / "state.json").exists, job)
        command = [sys.executable, "-m", "rl_dist.status", run_dir, "--follow", *FAST]
        follower = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        wait_until(
            lambda: read_status(run_dir)["iteration"] >= 6 and read_status(run_dir)["checkpoint"]
        )
        found = SimpleNamespace(**read_status(run_dir))
        assert (found.state, found.num_ranks, found.device) == ("running", 2, "cpu")
        assert found.strategy == "ddp"
        assert found.eta_s > 0 and found.steps_per_s > 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    out, _ = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 1
    assert " | running | iteration " in out and "state       dead: it ended during " in out
    assert read_status(run_dir)["state"] == "dead"
    tags = EventAccumulator(str(run_dir)).Reload().Tags()["scalars"]
    for rank in (0, 1):
        entries = [line["ranks"][rank] for line in records(run_dir)]
        assert any(entry["cpu/percent"] is not None for entry in entries[2:])
        assert all(0 <= entry["time/idle_share"] < 1 for entry in entries)
        assert f"rank_{rank}/cpu/percent" in tags
