"""--on_event: the command runs once for each event and cannot harm the run."""

import json
import logging

import pytest
from train_runs import assert_nobody_left, wait_until

from rl_dist.telemetry import events


@pytest.fixture
def call(tmp_path, caplog):
    """Return a function that calls a command for events and returns the warnings."""

    def call_for(command, *sent, wait_s=100.0):
        caplog.set_level(logging.WARNING, logger="rl_dist.telemetry.events")
        if command:
            events.configure(command, tmp_path / "run")
        for kind, message, facts in sent:
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
    first, end = map(json.loads, (tmp_path / "json").read_text().splitlines())
    assert end["event"] == "finished" and {"time", "host"} <= set(first)
    about = {"event": "restarted", "message": message, "restart": 2}
    assert first | about | {"run_dir": str(tmp_path / "run")} == first
    expected = f"restarted|{message}|{tmp_path}/run|2\nfinished||{tmp_path}/run|\n"
    assert (tmp_path / "variables").read_text() == expected
    events.configure("", tmp_path / "run")
    assert call("", ("failed", "", {})) == []  # without a command nothing runs


@pytest.mark.parametrize(
    ("command", "code"),
    [("echo no such user >&2; exit 1", 1), ("no_such_command", 127), ("kill -9 $$", -9)],
)
def test_a_command_that_fails_is_one_warning(call, command, code):
    (warning,) = call(command, ("failed", "x" * 10_000, {"odd": {"not": "plain"}, "nul": "a\0b"}))
    assert warning.endswith(f"code {code}") and "\n" not in warning


def test_a_command_that_takes_long_does_not_block(call, tmp_path):
    events.configure(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", tmp_path)
    events.notify("failed")
    (tmp_path / "go").touch()
    assert call("") == []


@pytest.mark.parametrize(("limit_s", "wait_s", "number"), [(1.5, 100.0, 1), (20.0, 0.3, 2)])
def test_a_command_that_hangs_is_ended_with_all_that_it_started(
    call, tmp_path, monkeypatch, limit_s, wait_s, number
):
    monkeypatch.setattr(events, "LIMIT_S", limit_s)
    pid = tmp_path / "pid"
    events.configure(f"echo $$ > {pid}; sleep 1000 & wait", tmp_path)
    for _ in range(number):
        events.notify("failed")
    session = int(wait_until(lambda: pid.exists() and pid.read_text()))
    call("", wait_s=wait_s)
    assert_nobody_left(session)
    assert len(wait_until(lambda: call(""))) == 1
