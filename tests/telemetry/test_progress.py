"""What is shown of how far something is."""

import pytest

from rl_dist.telemetry import progress
from rl_dist.telemetry.progress import Progress, Stages


@pytest.mark.parametrize("terminal", [True, False])
def test_episodes_beyond_the_budget_are_counted_and_are_the_whole(terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    display = Progress(96, "episodes", 0)
    display.show({"iteration": 1}, 60)
    before = capsys.readouterr().err
    display.show({"iteration": 2}, 99)
    display.close()
    shown = capsys.readouterr().err
    assert "60/96" in before and "99/99" in shown and "100%" in shown and "99/96" not in shown


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_of_a_plan_follows_from_what_its_parts_took(clock, capsys):
    stages = Stages()
    stages.expect(1.0, 0.5, 2.5)
    stages.begin("one copy")
    clock[0] += 20
    stages.advance(0.5)  # 20 s for half a unit of four
    clock[0] += 1
    stages.advance(0.6)  # too soon for another line
    clock[0] += 19
    stages.expect(0.5, 1.5)  # the first has told that there is less to do
    stages.begin("reductions")
    stages.close()
    assert capsys.readouterr().err.splitlines() == [
        "measuring 1 of 3: one copy; 00:00 passed, time left: not known yet",
        "measuring 1 of 3: one copy (50%); 00:20 passed, about 02:20 left",
        "measuring 2 of 3: reductions; 00:40 passed, about 01:20 left",
    ]


def test_a_plan_on_a_terminal_is_one_line_that_changes(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    stages = Stages()
    stages.expect(1.0, 1.0)
    stages.begin("one copy")
    clock[0] += 10
    stages.advance(1.0)
    stages.begin("two copies")
    stages.close()
    shown = capsys.readouterr().err
    assert "1 of 2: one copy (100%); 00:10 passed, about 00:10 left" in shown
    assert "2 of 2: two copies" in shown and "\n" not in shown and shown.count("\r") >= 3


def test_a_plan_that_is_not_shown_is_counted_all_the_same(clock, capsys):
    stages = Stages(shown=False)
    stages.expect(1.0, 3.0)
    stages.begin("one copy")
    clock[0] += 7
    stages.begin("three more")
    assert (stages.number, stages.total, stages.left_s) == (2, 2, pytest.approx(21.0))
    assert capsys.readouterr().err == ""
