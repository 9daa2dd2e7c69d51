"""Text that the locale cannot print is escaped; names that it cannot hold are refused."""

import os
import subprocess
import sys

import pytest
from train_runs import RECALL, REPO, only_error

SHORT = [*RECALL, "--total_steps", "64", "--eval_episodes", "2", "--validate_every", "0"]
ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(folder, variables, *argv):
    """Run the command clstm-ppo in a folder, in a given locale."""
    command = [sys.executable, REPO / "clstm_ppo.py", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two ranks into a folder whose name the encoding of stdout lacks."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(folder, ASCII, "train", *SHORT, "--num_gpus", "2", "--run_dir", "mod\u00e8le")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_training_prints_all_lines(trained):
    assert trained[1].count(b"mod\\xe8le") == 2


@pytest.mark.parametrize("command", ["status", "evaluate"])
def test_other_commands_print_all_lines(command, trained):
    done = run(trained[0], ASCII, command, "mod\u00e8le")
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_name_that_the_locale_cannot_hold_is_refused_with_the_remedy(tmp_path):
    done = run(tmp_path, C_LOCALE, "status", "mod\u00e8le")
    assert done.returncode == 2 and "PYTHONUTF8=1" in only_error(done.stderr.decode())


def test_text_of_the_users_is_printed_in_the_c_locale(tmp_path):
    (tmp_path / "loud.py").write_text("raise RuntimeError('\u00e9')\n", encoding="utf-8")
    done = run(tmp_path, C_LOCALE, "train", "--env", "loud:Loud-v0")
    assert "RuntimeError: \\xe9" in only_error(done.stderr.decode())


def test_a_training_runs_in_a_folder_that_the_locale_cannot_hold(tmp_path):
    folder = tmp_path / "mod\u00e8le"
    folder.mkdir()
    assert run(folder, C_LOCALE, "train", *SHORT).returncode == 0
