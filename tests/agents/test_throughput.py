"""The benchmarks of speed run, in small, and print what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(name, *flags):
    command = [sys.executable, ROOT / "benchmarks" / name, *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return [line if line[0] != "{" else json.loads(line) for line in done.stdout.splitlines()]


def test_each_work_is_compared_with_the_newest_file_of_this_kind_of_machine_that_has_it(tmp_path):
    def bench(*works):
        return run("throughput.py", "--turns", 1, "--threads", 1, "--folder", tmp_path, *works)

    machine, *rows, below = [line for line in bench() if isinstance(line, dict)]
    assert machine["torch"] and machine["cpu"] != "x86_64"
    assert [row["work"] for row in rows[:3]] == ["A", "B", "C"] and len(rows) == 5
    assert all(row["steps_per_gflop"][0] > 0 for row in rows)
    assert all(row["part_of_product"] > 0 for row in rows[:3])
    assert below["gb_per_s"] > 0 and len(below["points"]) == 3 * 5
    assert all(point["gflops"] > 0 for point in below["points"])
    (first,) = tmp_path.iterdir()
    written = json.loads(first.read_text())
    assert written == {"machine": machine, "rows": rows, "roofline": below}
    other = json.dumps(written | {"machine": machine | {"threads": 2}})
    first.with_stem("3-another-machine").write_text(other)
    first.with_stem("3-another-work").write_text(json.dumps(written | {"rows": rows[1:2]}))
    compared = [line for line in bench("--work", "A") if isinstance(line, str)]
    assert [first.name in line for line in compared] == [True, True, True, False]
    assert compared[0].startswith("A: ") and compared[1].startswith("trading environment alone")
