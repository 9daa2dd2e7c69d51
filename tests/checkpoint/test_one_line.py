"""Commands refuse bad input, or what the system does not allow, in one line without a traceback."""

import errno
import json
import os
from pathlib import Path

import pytest
from train_runs import RECALL, daily_bars, evaluate_here, only_error, run_here, train_here

import check_gpu_setup
import train_distributed
from agents.export import command as export
from agents.pretrain import command as pretrain
from agents.run import start
from envs.trading.market_data import MarketDataError, read_bars
from rl_dist import status
from rl_dist.checkpoint import __main__ as checkpoint
from rl_dist.errors import explained, explains_errors
from rl_dist.run_dir import RunDir
from rl_dist.speedup import __main__ as speedup

TINY = [*RECALL, "--eval_episodes", "2", "--total_steps", "128"]
COMMANDS = {
    "train": (train_distributed.main, [*TINY, "--run_dir"]),
    "resume": (train_distributed.main, ["--resume"]),
    "pretrain": (pretrain.main, ["--run_dir"]),
    "resume pretrain": (pretrain.main, ["--resume"]),
    "check": (check_gpu_setup.main, [*TINY, "--run_dir"]),
    "status": (status.main, []),
    "checkpoint": (checkpoint.main, ["verify"]),
    "speedup": (speedup.main, []),
    "export": (export.main, []),
}


@pytest.mark.parametrize("name", ["x" * 300, "bad\udcff"], ids=["too long", "no UTF-8"])
@pytest.mark.parametrize("command", [*COMMANDS, "evaluate"])
def test_a_name_that_cannot_be_is_one_line(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if command == "evaluate":
        assert evaluate_here(monkeypatch, name) == 2
    else:
        main, words = COMMANDS[command]
        assert run_here(main, [*words, name], monkeypatch) == 2
    assert name[:3] in only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHELASTIC_RESTART_COUNT", "abc"),
        ("TORCHELASTIC_RESTART_COUNT", "-1"),
        ("TORCHELASTIC_MAX_RESTARTS", "1.5"),
    ],
)
def test_a_variable_of_torchrun_that_is_no_count_is_one_line_before_anything_is_written(
    name, value, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(name, value)
    for main, words in (COMMANDS["train"], COMMANDS["pretrain"]):
        assert run_here(main, [*words, tmp_path / "run"], monkeypatch) == 2
        assert name in only_error(capsys.readouterr().err)
    assert evaluate_here(monkeypatch, trained) == 2
    assert name in only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


# ---- something else in the place of a file or folder

TRAINED = ["config.json", "metrics.jsonl", "events.out.tfevents.1"]
TRAINED += ["logs/rank_0.log", "plots/learning_curve.png", "wandb_run_id"]
EXPORTED = [f"export/onnx/{name}" for name in ("policy.onnx", "contract.json", "README.md")]
KINDS = [("a directory", TRAINED), *((kind, TRAINED + EXPORTED) for kind in ("a pipe", "a link"))]
WRONG = [(name, kind) for kind, names in KINDS for name in names]
FOLDERS = ("plots", "logs", "profile", "checkpoints", "wandb", "export", "export/onnx")
WRONG += [(name, kind) for name in FOLDERS for kind in ("a file", "a link to a folder")]
MAKE = {"a pipe": os.mkfifo, "a directory": os.mkdir, "a file": Path.touch}


def everything_in(path):
    return {each: each.is_file() and each.read_bytes() for each in [path, *path.rglob("*")]}


@pytest.mark.timeout(60)  # opening a pipe would take for ever
@pytest.mark.parametrize(("place", "kind"), WRONG)
def test_what_lies_in_the_place_of_a_file_or_folder_is_one_line(
    place, kind, copy, tmp_path, monkeypatch, capsys
):
    path, target = copy / place, tmp_path / "target"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # else somebody would miss it
        path.rename(target)
    elif kind == "a link to a folder":
        target.mkdir()
    else:
        target.write_text("kept")
    MAKE.get(kind, lambda path: path.symlink_to(target))(path)
    kept = everything_in(target)
    monkeypatch.setattr(start, "launch", lambda *_, **__: 0)
    main, words = COMMANDS["export" if place.startswith("export") else "resume"]
    assert run_here(main, [*words, copy], monkeypatch) == 2
    assert str(path) in only_error(capsys.readouterr().err)
    assert everything_in(target) == kept


def test_a_line_of_metrics_that_is_no_record_is_dropped(copy):
    metrics = copy / "metrics.jsonl"
    whole = metrics.read_text()
    for line in ({"iteration": 1, "global_step": None}, {"iteration": None}, [], 1):
        metrics.write_text(json.dumps(line) + "\n" + whole)
        assert RunDir(copy).cut_records(9) == 3
        assert metrics.read_text() == whole


def test_figures_that_are_no_numbers_are_left_out_of_the_picture(copy, monkeypatch):
    metrics = copy / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records[0] = {"iteration": 1, "global_step": 64, "valid/sharpe": "x"}
    records[1]["episode/return"] = [1]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert train_here(monkeypatch, "--resume", copy) == 0
    assert (copy / "plots" / "learning_curve.png").exists()


# ---- days, and refusals of the system


@pytest.mark.parametrize("date", ["0000-01-01", "-001-01-01"])
def test_a_year_that_never_was_is_no_date(date, tmp_path):
    bars = daily_bars(2, 30)
    bars.loc[0, "date"] = date
    bars.to_csv(tmp_path / "bars.csv", index=False)
    with pytest.raises(MarketDataError, match=f"'{date}' is not a date"):
        read_bars(tmp_path / "bars.csv")


def test_a_refusal_of_the_system_is_printed_with_its_fix(capsys):
    @explains_errors
    def refuses(number):
        raise OSError(number, os.strerror(number), "a/file")

    assert refuses(errno.EMFILE) == 1
    line = only_error(capsys.readouterr().err)
    assert "a/file" in line and "ulimit" in line
    assert refuses(errno.ENOTDIR) == 2
    assert "move away" in only_error(capsys.readouterr().err)
    assert explained(ValueError("two\nlines")) == ("two lines", 2)
