"""The command of --on_event runs once for each event and cannot harm the run."""

import json
import logging

import pytest
from train_runs import assert_nobody_left, wait_until

from rl_dist.telemetry import events


@pytest.fixture
def call(tmp_path, caplog):
    """Return a function that runs a command for some events and returns the warnings."""

    def call_for(command, *sent, wait_s=100.0):
        events.configure(command, tmp_path / "run")
        for kind, message, facts in sent:
            events.notify(kind, message, **facts)
        events.close(wait_s)
        return caplog.messages

    caplog.set_level(logging.WARNING, logger="rl_dist.telemetry.events")
    return call_for


def test_an_event_arrives_as_json_on_stdin_and_as_variables(call, tmp_path):
    shown = "$RL_EVENT|$RL_MESSAGE|$RL_RUN_DIR|$RL_RESTART"
    command = f'cat > {tmp_path}/$RL_EVENT; echo "{shown}" >> {tmp_path}/$RL_EVENT'
    message = 'rank 1 "fell"; $(false)'
    assert call(command, ("restarted", message, {"restart": 2}), ("finished", "", {})) == []
    event, variables = (tmp_path / "restarted").read_text().splitlines()
    about = {"event": "restarted", "message": message, "restart": 2}
    expected = about | {"run_dir": str(tmp_path / "run")}
    assert json.loads(event) == json.loads(event) | expected
    assert variables == f"restarted|{message}|{tmp_path}/run|2"
    assert (tmp_path / "finished").read_text().endswith(f"\nfinished||{tmp_path}/run|\n")
    # Without a command, an event does nothing.
    assert call("", ("failed", "", {})) == []


@pytest.mark.parametrize("command, code", [("cat; exit 1", 1), ("kill -9 $$", -9)])
def test_a_command_that_fails_is_one_warning(call, command, code):
    (warning,) = call(command, ("failed", "x" * 10_000, {"odd": {"not": "plain"}, "nul": "a\0b"}))
    assert warning.endswith(f"code {code}") and "\n" not in warning


def test_a_command_that_hangs_is_killed_with_all_its_child_processes(call, tmp_path):
    command = f"echo $$ > {tmp_path}/$RL_EVENT; sleep 1000 & wait"
    events.configure(command, tmp_path)
    events.notify("failed")
    session = int(wait_until(lambda: (pid := tmp_path / "failed").exists() and pid.read_text()))
    assert len(call(command, ("stopped", "", {}), wait_s=0.3)) == 2
    assert_nobody_left(session)
