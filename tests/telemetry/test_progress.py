"""What is shown of how far something is."""

import pytest

from rl_dist.telemetry import progress
from rl_dist.telemetry.progress import Progress, Stages


def shown(rates, total=96, start=0):
    display = Progress(total, "episodes", start)
    for iteration, rate in enumerate(rates, 1):
        record = {"iteration": iteration, "time/sps": rate, "episode/return": None}
        if iteration == 1:
            record["episode/return"] = 0.25
        display.show(record, start + 33 * iteration)
    display.close()


def test_without_a_terminal_there_are_a_few_plain_lines(capsys):
    shown([7123.4] * 3)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("iteration 1 | 33/96 episodes (34%)")
    # episodes beyond the budget are the whole
    assert last.startswith("iteration 3 | 99/99 episodes (100%)")
    for words in ("steps/s=7,123", "return=0.25", "ETA "):
        assert words in first and words in last


def test_on_a_terminal_there_is_one_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown([50.0], total=40, start=5)
    err = capsys.readouterr().err
    assert "38/40" in err and "return=0.25" in err and err.count("\n") == 1


def test_the_throughput_shown_is_the_median_of_the_latest_iterations(capsys):
    shown([9000.0, *[100.0] * 3, 900.0, 110.0, 120.0, 130.0, 95.0, 5000.0, None])
    # of nine; the first has been forgotten
    assert "steps/s=110," in capsys.readouterr().err.splitlines()[-1]


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
    stages.expect(0.5, 1.5)  # the first shows that there is less to do
    stages.begin("reductions")
    stages.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "measuring 1 of 3: one copy",
        "measuring 1 of 3: one copy (50%)",
        "measuring 2 of 3: reductions",
    ]
    assert "not known" in lines[0] and "02:20 left" in lines[1] and "01:20 left" in lines[2]


def test_a_plan_that_is_not_shown_is_counted_all_the_same(clock, capsys):
    stages = Stages(shown=False)
    stages.expect(1.0, 3.0)
    stages.begin("one copy")
    clock[0] += 7
    stages.begin("three more")
    assert (stages.number, stages.total, stages.left_s) == (2, 2, pytest.approx(21.0))
    assert capsys.readouterr().err == ""
