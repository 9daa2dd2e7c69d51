"""The table of metrics holds what runs write, and nothing else."""

import pytest
from train_runs import SIZES, SMALL, records, train_here

from agents.run.metric_table import METRICS, MONITORED, OTHER_TASKS, TRADING

CARTPOLE = [
    *("--env", "CartPole-v1", "--total_steps", "256", "--eval_episodes", "2"),
    *SIZES[2:],
]


@pytest.mark.parametrize(
    ("flags", "task"), [(CARTPOLE, OTHER_TASKS), (SMALL, TRADING)], ids=["cartpole", "trading"]
)
def test_a_run_writes_exactly_the_metrics_of_the_table(flags, task, tmp_path, monkeypatch):
    assert train_here(monkeypatch, *flags, "--run_dir", tmp_path / "run") == 0
    last = records(tmp_path / "run")[-1]
    written = {
        name: metric for name, metric in METRICS.items() if metric.when in ("", task, MONITORED)
    }
    assert set(last) == {name for name, metric in written.items() if metric.overall}
    assert set(last["ranks"][0]) == {name for name, metric in written.items() if metric.per_rank}
