"""Run some examples with small budgets; other examples have separate test files."""

import matplotlib
import pytest
from train_runs import REPO

from agents.learner.network.own_modules import core_problem
from examples.phase_core import PhaseCore
from rl_dist.files import read_object

TINY = {"num_envs": 4, "num_steps": 16, "bptt_steps": 8, "batch_size": 4, "hidden_size": 8}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the examples write to runs/ in the current folder
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_quick_start_notebook_runs_from_its_first_cell_to_its_last(capsys):
    matplotlib.use("agg")
    notebook = read_object(REPO / "examples/quickstart.ipynb")
    names = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("30_000", "4096, eval_episodes=4")
            exec(compile(code, "cell", "exec"), names)
    assert [step for step, _ in names["history"]] == [2048, 4096]
    assert "return of one episode:" in capsys.readouterr().out


def test_the_example_core_meets_the_contract():
    assert core_problem(PhaseCore(5, 16, 1), 5, 16) == ""


@pytest.mark.parametrize("lower, state, count", [(-1.0, "COMPLETE", 4), (1e9, "PRUNED", 1)])
def test_a_search_ends_the_trials_that_its_pruner_stops(lower, state, count):
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    from examples import optuna_search

    tiny = TINY | {"validate_every": 1, "eval_episodes": 2}
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=lower))
    study.optimize(lambda trial: optuna_search.objective(trial, 256, **tiny), 1)
    (trial,) = study.trials
    assert trial.state.name == state and len(trial.intermediate_values) == count
