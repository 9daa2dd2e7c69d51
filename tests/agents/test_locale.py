"""Text that the locale cannot print is escaped; names that it cannot hold are used."""

import pytest
from train_runs import BRIEF, MAIN, RECALL, only_error, run_in

TRAIN = [MAIN, "train", *RECALL, *BRIEF]
MODEL = "mod\u00e8le"
ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two ranks into a folder whose name the encoding of stdout lacks."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_in(folder, *TRAIN, "--num_gpus=2", "--run_dir", MODEL, **ASCII)[0]


def test_a_training_prints_all_lines(trained):
    assert trained[1].count("mod\\xe8le") == 2


def test_an_evaluation_prints_all_lines(trained):
    assert not run_in(trained[0], MAIN, "evaluate", MODEL, **ASCII)[1]


@pytest.mark.parametrize("command", ["status", "evaluate"])
def test_a_name_that_the_locale_cannot_hold_is_used(command, trained):
    assert MODEL in run_in(trained[0], MAIN, command, MODEL, **C_LOCALE)[0]


def test_text_of_the_users_is_printed_in_the_c_locale(tmp_path):
    (tmp_path / "loud.py").write_text("raise RuntimeError('\u00e9')\n", encoding="utf-8")
    errors = run_in(tmp_path, MAIN, "train", "--env=loud:Loud-v0", code=2, **C_LOCALE)[1]
    assert "RuntimeError: \u00e9" in only_error(errors)


def test_a_training_runs_in_a_folder_that_the_locale_cannot_hold(tmp_path):
    folder = tmp_path / MODEL
    folder.mkdir()
    assert MODEL in run_in(folder, *TRAIN, "--run_dir", MODEL, **C_LOCALE)[0]
