"""The benchmarks of speed run, in small, and print what they promise."""

import json
import os
import subprocess
import sys

import pytest
from time_to_solve import Goal, Moment, solved_at
from train_runs import run_benchmark as run

PEERS = os.environ.get("PEERS_PYTHON", sys.executable)  # of an environment with other trainers
pytestmark = pytest.mark.timeout(1000)


@pytest.mark.slow
def test_each_work_is_compared_with_the_newest_file_of_this_kind_of_machine_that_has_it(tmp_path):
    command = ["throughput.py", "--turns", 1, "--threads", 1, "--folder", tmp_path]
    machine, *rows = [line for line in run(*command) if isinstance(line, dict)]
    assert machine["torch"] and [row["work"] for row in rows] == ["A", "B", "C"]
    assert all(row["steps_per_gflop"][0] > 0 for row in rows)
    (first,) = tmp_path.iterdir()
    written = json.loads(first.read_text())
    assert written == {"machine": machine, "rows": rows}
    other = json.dumps(written | {"machine": machine | {"threads": 2}})
    first.with_stem("3-another-machine").write_text(other)
    first.with_stem("3-another-work").write_text(json.dumps(written | {"rows": rows[1:2]}))
    compared = [line for line in run(*command, "--work", "A") if isinstance(line, str)]
    assert [first.name in line for line in compared] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_trainer_at_hand_takes_turns_with_ours(ranks):
    flags = ["--python", PEERS, "--tasks", "cartpole", "--threads", ranks, "--ranks", ranks]
    _, *rows = run("against_peers.py", *flags, "--minutes", 0, "--fewest", 1, "--warm_up", 0)
    ours, *peers = [row for row in rows if "skipped" not in row]
    assert ours["trainer"] == "ours" and len(rows) == 5 and peers
    assert all(row["steps_per_s"] > 0 and row["ours is faster"][0] > 0 for row in peers)


def test_a_task_is_solved_when_its_mean_comes_to_the_goal_to_stay():
    def solved(*means):  # of two episodes each
        moments = [Moment(0.0, n, mean, 2 * bool(mean)) for n, mean in enumerate(means)]
        return solved_at(moments, Goal(475.0, 4))

    assert solved(500, 500, 500) is None  # not yet for 4 more episodes
    assert solved(500, None, 500, 500, None, 500).steps == 2
    assert solved(500, 500, 400, 500, 500, 490, 490).steps == 4  # it fell before


@pytest.mark.slow
def test_two_trainers_take_turns_until_both_have_solved_the_task():
    if subprocess.run([PEERS, "-c", "import sb3_contrib"], capture_output=True).returncode:
        pytest.skip("PEERS_PYTHON names no Python with sb3-contrib")
    sizes = ["--seeds", 1, "--total_steps", 4096, "--mean", 10, "--episodes", 4, "--turn_s", 1]
    *_, row, _, solved, _ = run("time_to_solve.py", "--python", PEERS, *sizes)
    assert all(float(cell.replace(",", "")) > 0 for cell in row.split("|")[1:-1])
    assert solved == "Solved: ours 1, sb3-contrib 1 of 1 seeds."
