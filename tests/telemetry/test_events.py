"""--on_event: the user's command is called for each event once, and can do the run no harm."""

import json
import logging
import os
import time

import psutil
import pytest

from rl_dist.telemetry import events


@pytest.fixture
def call(tmp_path, caplog):
    """Calls a command for events; returns the warnings that its calls left behind."""

    def call_for(command, *found, wait_s=30.0):
        caplog.set_level(logging.WARNING, logger="rl_dist.telemetry.events")
        events.configure(command, tmp_path / "run")
        for kind, message, facts in found:
            events.notify(kind, message, **facts)
        events.close(wait_s)
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


def test_a_command_that_hangs_neither_blocks_nor_stays(call, tmp_path, monkeypatch):
    monkeypatch.setattr(events, "LIMIT_S", 2.0)
    started_s = time.monotonic()
    events.configure(f"echo $$ > {tmp_path}/pid; sleep 60 & wait", tmp_path)
    events.notify("failed")
    assert time.monotonic() - started_s < 1.5
    (warning,) = call("")
    assert "was ended: it took more than 2 s" in warning
    assert not left_in_session(int((tmp_path / "pid").read_text()))


def left_in_session(session):
    """Wait for the end of all processes of a session; return those that do not end."""

    def inside(process):
        try:
            return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    deadline_s = time.monotonic() + 5
    while (left := list(filter(inside, psutil.process_iter()))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def test_the_end_of_a_run_does_not_wait_for_ever(call, tmp_path):
    started_s = time.monotonic()
    call(f"echo $$ > {tmp_path}/pid; sleep 60", *[("finished", "", {})] * 2, wait_s=1.0)
    assert time.monotonic() - started_s < 20
    assert not left_in_session(int((tmp_path / "pid").read_text()))


def test_without_a_command_nothing_is_called_and_no_thread_runs(call, tmp_path):
    assert call("", ("failed", "", {})) == []
    events.notify("failed")
    events.configure("true", tmp_path)
    assert not events._messenger.pool._threads
