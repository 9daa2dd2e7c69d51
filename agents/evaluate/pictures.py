"""Draw the learning curve of a run."""

import matplotlib.pyplot as plt
import numpy as np

from envs.pictures import save_plot
from envs.task import Task
from rl_dist.run_dir import RunDir

LABELS = {  # metric -> label of its axis
    "episode/return": "mean return of\ntraining episodes\n(sum of rewards)",
    "valid/return": "mean return of\nvalidation episodes\n(sum of rewards)",
    "valid/sharpe": "Sharpe ratio\non validation days",
}
BASELINES = {"valid/sharpe": ("valid/equal_weight_sharpe", "equal weight")}


def plot_learning_curve(directory: RunDir, title: str, task: Task) -> None:
    """Plot training returns and validation results over environment steps."""
    records = directory.records()

    def curve(name: str) -> np.ndarray:
        """Return the measured steps and values of a metric, [2, N]."""
        pairs = [(r["global_step"], r[name]) for r in records if r.get(name) is not None]
        return np.array(pairs, dtype=float).reshape(-1, 2).T

    names = ["episode/return", f"valid/{task.scored_by}"]
    names = [name for name in names if any(name in record for record in records)]
    _, rows = plt.subplots(len(names), sharex=True, squeeze=False, figsize=(8, 6))
    window = max(1, len(records) // 20)  # iterations
    for name, (axes,) in zip(names, rows, strict=True):
        steps, values = curve(name)
        # If there are few values, show each as a dot: most iterations have no validation.
        axes.plot(
            steps,
            values,
            marker="." if len(values) < 100 else "",
            alpha=0.5,
            label="measured",
        )
        if name == "episode/return" and 1 < window <= len(values):
            smooth = np.convolve(values, np.full(window, 1 / window), mode="valid")
            axes.plot(
                steps[window - 1 :], smooth, linewidth=2, label=f"mean of {window} iterations"
            )
        if name in BASELINES:
            baseline, label = BASELINES[name]
            axes.plot(*curve(baseline), linestyle="--", label=label)
        if task.solved_at is not None and name.endswith("return"):
            axes.axhline(
                task.solved_at, color="gray", linestyle="--", label="solved (reward_threshold)"
            )
        axes.legend()
        axes.set_ylabel(LABELS.get(name, name))
        axes.grid()
    rows[0, 0].set_title(title)
    rows[-1, 0].set_xlabel("environment steps")
    save_plot(directory.picture("learning_curve"), task.watermark)
