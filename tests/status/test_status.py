"""The status command: states of a run, figures, damaged files, and --follow."""

import json
import random
import re
import subprocess
import sys

import pytest
from train_runs import REPO, printed_error, run_here

from rl_dist import status
from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir
from rl_dist.status import describe, read_status

RANKS = [{"rank": rank, "pid": 7, "host": "h", "device": "cpu"} for rank in range(2)]
STATE = {"num_ranks": 2, "ranks": RANKS, "strategy": "ddp", "precision": "fp32", "target": 100}
SAVED = {"path": "checkpoints/iteration_00000001.pt", "iteration": 1}
COUNTERS = {"unit": "episodes", "iteration": 3, "global_step": 30, "episodes": 3}


def record(iteration, **figures):
    """Return the metrics of an iteration with 10 steps and 1 episode in 0.1 s."""
    counters = {"iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration}
    return counters | {"time/sps": 100.0, "episode/return": None, "ranks": []} | figures


@pytest.fixture
def run(tmp_path):
    """Return a RunDir with 3 records and a method `set_state` that writes state.json."""
    run = RunDir(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    run.config_path.write_text('{"task": {"env": "Recall-v0"}}')
    ranks = [{"rank": 0, "cpu/percent": 90.0, "gpu/power_w": None}, {"rank": 1, "cpu/percent": 50}]
    run.write_records(
        [
            record(1, **{"episode/return": 1.0, "valid/return": 0.25}, ranks=ranks),
            record(2, **{"episode/return": 5.0, "time/sps": 50.0}),
            record(3, ranks=[{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}]),
        ]
    )

    def set_state(phase="training", **changes):
        content = STATE | COUNTERS | {"phase": phase, "checkpoint": SAVED} | changes
        run.state_path.write_text(json.dumps(content))

    run.set_state = set_state
    set_state()
    return run


@pytest.mark.parametrize("length, done", [({}, 3), ({"unit": "steps", "target": 1000}, 30)])
def test_a_run_with_a_held_lock_is_shown_as_running_with_its_figures(
    run, monkeypatch, capsys, length, done
):
    run.set_state(**length)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    monkeypatch.chdir(run.path.parents[1])  # no path: the newest run in runs/ is shown
    with run.hold():
        assert status.main(["--json"]) == status.main([str(run.path)]) == 0
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    line, *rows = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    expected = {
        "state": "running", "env": "Recall-v0", "iteration": 3, "steps_per_s": 100,
        "checkpoint": SAVED, "eta_s": pytest.approx(9.7),
        "returns": {"episode/return": 5.0, "valid/return": 0.25},
    }  # fmt: skip
    assert found | expected == found and found["done"] == done
    use = [{"cpu/percent": 90, "time/idle_share": 0.4}, {"cpu/percent": 50}]
    assert found["ranks"] == [rank | more
                              for rank, more in zip(RANKS, use, strict=True)]  # fmt: skip
    assert "valid/return 0.25" in "\n".join(rows)


@pytest.mark.parametrize(
    "phase, changes, state, reason",
    [
        ("starting", {}, "starting", ""),
        ("restarting", {"restarts": 2}, "restarting", "restart 2"),
        ("validation", {}, "running", "validation"),
        ("done", {"exit": {"code": 0}}, "finished", ""),
        ("stopped", {"exit": {"code": 143}, "checkpoint": None}, "stopped", "no checkpoint"),
        ("restarting", {"exit": {"code": 143}}, "stopped", "torchrun"),
        ("failed", {"exit": {"code": 1, "error": "rank 1"}}, "failed", "rank 1"),
        ("training", {"checkpoint": None}, "dead", "no checkpoint"),
        ("training", {}, "dead", "--resume"),
    ],
)
def test_lock_phase_and_exit_determine_the_state_and_the_exit_code(
    phase, changes, state, reason, run, capsys
):
    run.set_state(phase, **changes)
    if state in ("starting", "restarting", "running"):
        run.hold()
    found = read_status(run.path)
    assert found["state"] == state and reason in found["reason"]
    if not run.lock:  # the run has ended, so --follow returns
        assert status.main([str(run.path), "--follow"]) == (state in ("failed", "dead"))
        assert capsys.readouterr().out.startswith(state)
        run.write_summary({})
        assert read_status(run.path)["state"] == "finished"
    run.release()


def damaged(data, rng):
    """Return `data` with a key, a value or a longer part replaced by bad bytes."""
    at, to = rng.choice([*re.finditer(rb"[^,:{}\[\]]+", data)]).span()
    ends = [to, len(data), rng.randrange(at, len(data))]
    odd = [b"", b"null", b"-1", b"1e999", b"NaN", b"{}", b"[" * 3000, b"9" * 400, b"\x1b\xff"]
    return data[:at] + rng.choice(odd) + data[rng.choice(ends) :]


def test_a_run_with_damaged_files_is_shown_or_refused_in_one_line(run):
    run.set_state("failed", exit={"code": 1, "error": "x"})
    paths = [run.config_path, run.metrics_path, run.state_path]
    rng, refused = random.Random(1), 0
    for path in paths * 100:
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, rng))
        try:
            found = read_status(run.path)
            assert all(text.isprintable() for text in describe(found).values())
            json.dumps(found, allow_nan=False)
        except UserError as error:
            assert path == run.state_path and "\n" not in str(error)
            refused += 1
        path.write_bytes(whole)
    assert 10 < refused <= 100  # 100 of the 300 damaged files were state.json


@pytest.mark.parametrize("argv", [[], ["nowhere"], ["empty"], ["file"], ["empty", "--every"]])
def test_a_path_without_a_run_and_bad_usage_are_one_line_and_exit_code_2(
    argv, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert run_here(status.main, *argv) == 2
    assert (argv or ["runs/"])[-1] in printed_error(capsys)


def test_follow_shows_each_change_until_the_end(run, capsys, monkeypatch):
    run.hold()
    left = [4, 4, 5]

    def train_on(every_s):
        if left:
            run.set_state(iteration=left.pop(0))
        else:
            run.set_state("done", exit={"code": 0})
            run.release()

    monkeypatch.setattr("time.sleep", train_on)
    assert status.main([str(run.path), "--follow"]) == 0
    seen = re.findall(r"^(\w+).* iteration (\d)", capsys.readouterr().out, re.MULTILINE)
    assert seen == [("running", "3"), ("running", "4"), ("running", "5"), ("finished", "3")]


def test_neither_the_status_command_nor_the_package_loads_torch(run):
    code = "import sys; from rl_dist import status; status.main(sys.argv[1:]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, run.path], cwd=REPO).returncode == 0
