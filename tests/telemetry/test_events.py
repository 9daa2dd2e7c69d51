"""--on_event: the user's command is called for each event once, and can do the run no harm."""

import json
import logging

import pytest
from train_runs import assert_nobody_left, wait_until

from rl_dist.telemetry import events


@pytest.fixture
def call(tmp_path, caplog):
    """Calls a command for events; returns the warnings that its calls left behind."""

    def call_for(command, *found):
        caplog.set_level(logging.WARNING, logger="rl_dist.telemetry.events")
        events.configure(command, tmp_path / "run")
        for kind, message, facts in found:
            events.notify(kind, message, **facts)
        events.close(100.0)
        return caplog.messages

    yield call_for
    events.close(0.0)


def test_an_event_arrives_as_json_on_stdin_and_as_variables(call, tmp_path):
    shown = "$RL_EVENT|$RL_MESSAGE|$RL_RUN_DIR|$RL_RESTART"
    command = f'cat >> {tmp_path}/json; echo "{shown}" >> {tmp_path}/variables'
    message = 'rank 1 "fell"; $(false)\nover'
    assert call(command, ("restarted", message, {"restart": 2}), ("finished", "", {})) == []
    text = (tmp_path / "json").read_text()
    first, end = json.JSONDecoder().raw_decode(text)
    assert json.loads(text[end:])["event"] == "finished"
    about = {"event": "restarted", "message": message, "restart": 2}
    assert first | about | {"run_dir": str(tmp_path / "run")} == first
    assert {"time", "host"} <= set(first)
    expected = f"restarted|{message}|{tmp_path}/run|2\nfinished||{tmp_path}/run|\n"
    assert (tmp_path / "variables").read_text() == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo no such user >&2; exit 1", "failed with code 1: no such user"),
        ("no_such_command_here", "failed with code 127: "),
        ("kill -9 $$", "failed with code -9"),
    ],
)
def test_a_command_that_fails_is_one_warning(call, command, expected):
    (warning,) = call(command, ("failed", "x" * 10_000, {"odd": {"not": "plain"}, "nul": "a\0b"}))
    assert expected in warning and "\n" not in warning


def test_a_command_that_takes_long_does_not_block(call, tmp_path):
    events.configure(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", tmp_path)
    events.notify("failed")
    (tmp_path / "go").touch()
    assert call("") == []


def session_of_command(file):
    """The id of the session of a command that writes it to a file."""
    return int(wait_until(lambda: file.exists() and file.read_text()))


def test_a_command_that_hangs_is_ended_with_what_it_started(call, tmp_path, monkeypatch):
    monkeypatch.setattr(events, "LIMIT_S", 1.5)
    events.configure(f"echo $$ > {tmp_path}/pid; sleep 1000 & wait", tmp_path)
    events.notify("failed")
    session = session_of_command(tmp_path / "pid")
    (warning,) = call("")
    assert "was ended" in warning and "1.5 s" in warning
    assert_nobody_left(session)


def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path, caplog):
    events.configure(f"echo $$ > {tmp_path}/pid; sleep 1000", tmp_path)
    for _ in range(2):
        events.notify("finished")
    session = session_of_command(tmp_path / "pid")
    events.close(0.3)
    assert_nobody_left(session)
    (warning,) = wait_until(lambda: caplog.messages)
    assert "was ended" in warning


def test_without_a_command_nothing_is_called_and_no_thread_runs(call, tmp_path):
    assert call("", ("failed", "", {})) == []
    events.notify("failed")
    events.configure("true", tmp_path)
    assert not events._messenger.pool._threads
