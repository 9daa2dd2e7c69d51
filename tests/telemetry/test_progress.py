"""What is shown of how far something is."""

from rl_dist.telemetry.progress import Progress


def shown(rates, total=96, start=0):
    display = Progress(total, "episodes", start)
    for iteration, rate in enumerate(rates, 1):
        record = {"iteration": iteration, "time/sps": rate, "episode/return": None}
        if iteration == 1:
            record |= {"episode/return": 0.25, "valid/return": 0.5}
        display.show(record, start + 33 * iteration)
    display.close()


def test_without_a_terminal_there_are_a_few_plain_lines(capsys):
    shown([7123.4] * 3)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("iteration 1 | 33/96 episodes (34%)")
    # 99 episodes have ended
    assert last.startswith("iteration 3 | 96/96 episodes (100%)") and last.endswith("ETA 00:00")
    for words in ("steps/s=7,123", "return=0.25", "valid/return=0.5 (iteration 1)", "ETA "):
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
