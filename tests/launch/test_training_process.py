"""Training started from Python, and the public functions of rl_dist."""

import ctypes
import importlib
import os
import signal
import threading

import pytest
from train_runs import RECALL, lives, records, start, train_here, wait_until

import rl_dist
from rl_dist.launch.child import Child, as_flags, launch_distributed_training
from rl_dist.resume_check import differences, result_of

SHORT = [*RECALL, "--eval_episodes=4"]


@pytest.mark.slow
def test_a_successful_training_returns_its_result_and_monitoring_changes_no_figure(tmp_path):
    named = {"total_steps": 512, "anneal_lr": False, "num_gpus": 1, "stop_at": None}
    run_dir = tmp_path / "run"
    result = launch_distributed_training(
        SHORT, echo=False, run_dir=run_dir, monitor_every=0.01, **named
    )
    assert (result.success, result.exit_code, result.error) == (True, 0, "")
    assert result.run_dir == run_dir and result.iterations == 8
    assert result.final_losses and result.final_losses.items() <= records(run_dir)[-1].items()
    sampled = [line["ranks"][0] for line in records(run_dir)]
    assert any(rank["cpu/percent"] is not None for rank in sampled)
    flags = [*SHORT, *as_flags(named), "--monitor_every=0", "--run_dir", tmp_path / "plain"]
    assert train_here(*flags) == 0
    plain = [line["ranks"][0] for line in records(tmp_path / "plain")]
    assert not any(name.startswith(("cpu/", "ram/", "gpu/")) for rank in plain for name in rank)
    assert differences(result_of(run_dir), result_of(tmp_path / "plain")) == []


@pytest.mark.parametrize(
    "code, exit_code, error",
    [
        ("os.abort()", -6, "SIGABRT"),
        ("sys.exit(4)", 4, "without a report"),
        ("report_to_caller(error='too many cooks'); sys.exit(2)", 2, "too many cooks"),
    ],
)
def test_a_failed_training_returns_its_error(code, exit_code, error, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nfrom rl_dist.errors import report_to_caller\n{code}")
    result = launch_distributed_training(echo=False, script=script)
    assert (result.success, result.exit_code, result.run_dir) == (False, exit_code, None)
    assert error in result.error and (result.iterations, result.final_losses) == (0, {})


def test_ctrl_c_lets_the_training_save_before_it_is_raised(tmp_path):
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(
        "import pathlib, time\ntry:\n"
        f"    pathlib.Path({str(tmp_path / 'started')!r}).touch(); time.sleep(60)\n"
        f"except KeyboardInterrupt: pathlib.Path({str(saved)!r}).touch()"
    )

    def press():
        wait_until((tmp_path / "started").exists)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(echo=False, script=script)
    assert saved.exists()


@pytest.mark.parametrize("name", rl_dist.__all__)
def test_every_public_function_exists_and_documents_an_example(name):
    home = importlib.import_module(f"rl_dist.{rl_dist._HOMES[name]}")
    function = getattr(rl_dist, name)
    assert function is getattr(home, name) and f"{name}(" in function.__doc__


def test_a_child_loads_no_library_before_it_becomes_another_program(tmp_path, monkeypatch):
    # loading a library between fork and exec can deadlock if the process has threads
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert Child(["-c", ""], tmp_path).job.wait(60) == 0


def test_a_child_dies_with_its_caller(tmp_path):
    call = f"Child(['-c', 'import time; time.sleep(999)'], pathlib.Path({str(tmp_path)!r}))"
    imports = "import pathlib; from rl_dist.launch.child import Child"
    caller = start("-c", f"{imports}; child = {call}; print(child.job.pid, flush=True); input()")
    child = int(caller.stdout.readline())
    assert lives(child)
    caller.kill()
    caller.communicate()
    wait_until(lambda: not lives(child))
