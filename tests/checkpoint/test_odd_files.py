"""Odd files in a run directory (pipes, devices, giants, links) hang or end no reader."""

import pytest
from odd_files import ODD_FILES
from train_runs import RECALL, only_error, train_here

from rl_dist.checkpoint.__main__ import main
from rl_dist.checkpoint.store import (
    CheckpointError,
    find_latest_run,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from rl_dist.files import log_once
from rl_dist.run_dir import RunDir
from rl_dist.status import read_status
from rl_dist.telemetry.metrics import MetricsWriter

pytestmark = pytest.mark.timeout(60)  # opening a pipe would take for ever
TINY = [*RECALL, "--checkpoint_every", 1, "--eval_episodes", 2]


@pytest.fixture(autouse=True)
def nothing_printed_before():
    log_once.cache_clear()


def save(run_dir, iteration, keep=9, best=False):
    state = {"iteration": iteration}
    folder = run_dir / "checkpoints"
    return save_checkpoint(folder, state, iteration=iteration, keep=keep, best=best)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    save(path, 1)
    RunDir(path).begin_state(
        num_ranks=1, strategy="none", precision="fp32", target=5, unit="episodes"
    )
    return path


@pytest.mark.parametrize("odd", ODD_FILES)
@pytest.mark.parametrize("name", ["iteration_9.pt", "best.pt"])
def test_an_odd_file_among_checkpoints_is_passed_over_by_all_who_read(run_dir, odd, name, capsys):
    path = run_dir / "checkpoints" / name
    ODD_FILES[odd](path)
    assert latest_checkpoint(run_dir).name == "iteration_00000001.pt"
    assert find_latest_run(run_dir.parent) == run_dir
    is_giant = odd == "sparse giant"  # everything else is no file at all
    assert main(["verify", str(run_dir)]) == int(is_giant)
    assert main(["list", str(run_dir)]) == main(["inspect", str(run_dir)]) == 0
    assert (f"damaged: checkpoint {path} " in capsys.readouterr().out) == is_giant
    with pytest.raises(CheckpointError, match="cannot be read|is truncated") as error:
        load_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_giant_with_the_ends_of_a_checkpoint_is_not_read_either(run_dir):
    path = run_dir / "checkpoints" / "iteration_00000009.pt"
    data = (run_dir / "checkpoints" / "iteration_00000001.pt").read_bytes()
    with path.open("wb") as file:
        file.write(data[:1000])
        file.seek(2**42)
        file.write(data[1000:])
    with pytest.raises(CheckpointError, match="4,398,046,.* bytes, and at most"):
        load_checkpoint(path)
    assert latest_checkpoint(run_dir).name == "iteration_00000001.pt"


@pytest.mark.parametrize("odd", ODD_FILES)
@pytest.mark.parametrize(
    "name",
    ["iteration_00000000.pt", "iteration_00000002.pt", "iteration_00000003.pt", "best.pt"]
    + ["unfinished.part"],
)
def test_an_odd_file_stands_in_the_way_of_no_save(run_dir, odd, name):
    folder = run_dir / "checkpoints"
    ODD_FILES[odd](folder / name)
    is_first = name == "iteration_00000000.pt"  # this name is not written
    if odd == "directory" and not is_first:
        with pytest.raises(CheckpointError, match="cannot write"):
            [save(run_dir, iteration, best=True) for iteration in (2, 3)]
        assert list(folder.glob("*/of a user"))  # what it holds may be the user's
        return
    for iteration in (2, 3, 4):
        path = save(run_dir, iteration, keep=3, best=True)
        assert load_checkpoint(path) == {"iteration": iteration}
    kept = {f"iteration_0000000{iteration}.pt" for iteration in (2, 3, 4)}
    assert kept <= names(folder) and "iteration_00000001.pt" not in names(folder)
    stays = is_first and odd != "sparse giant"
    assert names(folder) == kept | {"best.pt"} | ({name} if stays else set())
    assert load_checkpoint(folder / "best.pt")["iteration"] == 4


@pytest.mark.parametrize("odd", ODD_FILES)
def test_the_status_of_a_run_with_odd_files_is_printed_or_refused(run_dir, odd):
    (run_dir / "logs").mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json", "logs/rank_0.log"):
        ODD_FILES[odd](run_dir / name)
        assert read_status(run_dir)["num_ranks"] == 1
    (run_dir / "state.json").unlink()
    ODD_FILES[odd](run_dir / "state.json")
    with pytest.raises((ValueError, OSError), match="state.json") as error:
        read_status(run_dir)
    assert "\n" not in str(error.value)


def test_a_run_that_begins_in_place_of_a_deleted_one_is_not_cleared_away_as_a_failed_start(
    tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    write = MetricsWriter.write

    def replace_first(writer, record, *, done):
        run_dir.rename(tmp_path / "moved")
        run_dir.mkdir()
        (run_dir / "config.json").write_text("of another run")
        write(writer, record, done=done)

    monkeypatch.setattr(MetricsWriter, "write", replace_first)
    assert train_here(monkeypatch, *TINY, "--total_steps", 640, "--run_dir", run_dir) == 1
    assert "deleted or replaced" in only_error(capsys.readouterr().err)
    assert [path.read_text() for path in run_dir.iterdir()] == ["of another run"]
