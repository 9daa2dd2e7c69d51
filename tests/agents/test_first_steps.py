"""Test user-defined cores and callbacks, the best checkpoint and initial weights."""

import json
import shutil
import sys

import pytest
from train_runs import RECALL, REPO, evaluate_here, only_error, records, train_here

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint

CARTPOLE = [*RECALL, "--env", "CartPole-v1", "--eval_episodes", "2"]
SHORT = [*CARTPOLE, "--total_steps", 192, "--validate_every", 1]


def test_a_core_and_a_callback_lie_in_the_current_directory_as_an_environment_may(
    tmp_path, monkeypatch
):
    shutil.copy(REPO / "tests/own_cores.py", tmp_path / "cores_here.py")
    (tmp_path / "calls_here.py").write_text("def stop(moment):\n    return False\n")
    monkeypatch.chdir(tmp_path)
    core = [*CARTPOLE, "--policy", "own", "--core", "cores_here:Decay", "--total_steps", 256]
    for words in (
        [*core, "--callback", "calls_here:stop", "--run_dir", "run"],
        ["--resume", "run"],
    ):
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
        assert train_here(monkeypatch, *words) == 0
    assert [line["iteration"] for line in records("run")] == [1, 2]


# ---- the best checkpoint, and initial weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train CartPole-v1 with a best checkpoint; return the run directory."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *SHORT, "--run_dir", run_dir) == 0
    return run_dir


def test_the_last_policy_and_the_best_are_evaluated_in_episodes_that_chose_neither(
    finished, tmp_path, monkeypatch, capsys
):
    def evaluated(*flags):
        assert evaluate_here(monkeypatch, finished, *flags, "--json", tmp_path / "json") == 0
        return json.loads((tmp_path / "json").read_text())["policy"]

    summary, chosen_by = json.loads((finished / "summary.json").read_text()), records(finished)[-1]
    best, last = summary["best"], summary["test"]
    assert evaluated() == best != last
    assert "checkpoints/best.pt" in capsys.readouterr().out
    assert evaluated("--which", "last") == last
    # Another seed gives other episodes. Validation and final evaluation also use different ones.
    assert evaluated("--seed", 2) != best
    assert any(chosen_by[f"valid/{name}"] != last[name] for name in ("return", "return_std"))


def test_a_run_starts_from_the_weights_and_statistics_of_another(
    finished, tmp_path, monkeypatch, capsys
):
    flags = [*CARTPOLE, "--init_from", finished, "--learning_rate", 0, "--total_steps", 64]
    assert train_here(monkeypatch, *flags, "--run_dir", tmp_path / "next") == 0
    first = load_checkpoint(finished / "checkpoints/best.pt")
    then = load_checkpoint(latest_checkpoint(tmp_path / "next"))
    assert then["iteration"] == 1
    for name, weight in first["policy"].items():
        assert (then["policy"][name] == weight).all(), name
    counts = [state["obs_normalizer"]["moments.count"] for state in (first, then)]
    assert counts[1] == counts[0] + 64
    capsys.readouterr()
    assert train_here(monkeypatch, *flags, "--hidden_size", 16, "--run_dir", tmp_path / "no") == 2
    assert "--hidden_size" in only_error(capsys.readouterr().err)
