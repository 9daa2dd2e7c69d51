"""The evaluation command: worlds, days, episodes, films, refusals."""

import json
import shutil
import signal

import gymnasium
import numpy as np
import pandas as pd
import pytest
from gymnasium import spaces
from PIL import Image
from train_runs import SIZES, SMALL, daily_bars, evaluate_here, only_error, start, train_here

from agents.evaluate import episodes, markets
from agents.evaluate.command import LOOKS
from envs.trading import task
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint

BRIEF = ["--validate_every", "0", "--num_episodes", "2"]
NO_VALIDATION = ["--train_end", "2019-01-04", "--test_start", "2019-01-07"]


class FadingEnv(gymnasium.Env):
    """Episodes of random lengths; the picture grows brighter with the age of the episode."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None, nan_at=0):
        self.render_mode, self.nan_at = render_mode, nan_at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.length = 0, int(self.np_random.integers(3, 9))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age += 1
        obs = np.full(2, np.nan if self.age == self.nan_at else 0.0, np.float32)
        return obs, 2.0, self.age == self.length, False, {}

    def render(self):
        return np.full((30, 900, 3), 10 * self.age, np.uint8)


for name, kwargs in (("Fading-v0", {}), ("FadingNan-v0", {"nan_at": 2})):
    gymnasium.register(name, FadingEnv, kwargs=kwargs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four finished runs, in one folder with the bars they need."""
    folder = tmp_path_factory.mktemp("runs")
    for name, bars in {"five": daily_bars(5), "four": daily_bars(4)}.items():
        bars.to_csv(folder / f"{name}.csv", index=False)
    daily_bars(5, seed=1).to_csv(folder / "other.csv", index=False)
    csv = [*SIZES, "--num_episodes", "40", "--data", folder / "five.csv", "--episode_days", "20"]
    jobs = {
        "simulated": [*SMALL, *BRIEF],
        "csv": csv,
        "csv_mlp": [*csv, "--policy", "mlp", *NO_VALIDATION],
        "fading": [*SIZES, *BRIEF, "--env", "Fading-v0", "--eval_episodes", "3"],
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(task, "NUM_TEST_WORLDS", 4)
        for name, flags in jobs.items():
            assert train_here(monkeypatch, *flags, "--run_dir", folder / name) == 0, name
    return folder


@pytest.fixture
def evaluated(runs, tmp_path, monkeypatch, capsys):
    """Calls the command: (what it printed, its figures)."""

    def call(run, *flags):
        file = tmp_path / "figures.json"
        code = evaluate_here(monkeypatch, runs / run, "--json", file, *flags)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out, json.loads(file.read_text())

    return call


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_the_table_shows_the_policy_beside_baselines_on_worlds_never_seen(runs, evaluated):
    text, figures = evaluated("simulated", "--num_worlds", "3")
    policies, ablation = figures["test"]["policies"], figures["test"]["ablation"]
    assert figures["test"]["markets"] == 3 and figures["test"]["days"][0] == "2019-06-03"
    assert set(policies) == {"policy", "equal weight", "reference", "memoryless rule"}
    assert len(ablation) == 1
    for name, entry in (policies | ablation).items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"  {name}  "))
        assert f"{entry['sharpe']:.2f}" in row.split() and f"{entry['gap_closed']:.0%}" in row
        if name != "equal weight":
            assert (
                "{:+.2f} [{:+.2f}, {:+.2f}]".format(*entry["against_equal_weight"]["sharpe"]) in row
            )
    assert policies["equal weight"]["exposure"] > 0.9
    assert policies["reference"]["gap_closed"] == pytest.approx(1.0)
    assert "SIMULATED" in text and "$" not in text and "annual" not in text
    assert (runs / "simulated" / "plots" / "evaluation.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("run", "spans"), [("csv", ["train", "valid"]), ("csv_mlp", ["train"]), ("simulated", ["test"])]
)
def test_the_command_repeats_the_figures_at_the_end_of_training(run, spans, runs, evaluated):
    summary = summary_of(runs / run)
    text, figures = evaluated(run, "--num_worlds", "4")
    assert figures == {span: summary[span] for span in spans}
    assert ("test" in summary) == (run == "simulated") != ("--open_test" in text)
    assert ("no validation span" in text) == (run == "csv_mlp")
    assert ("fewer than 60 days" in text) == (run == "csv")


def test_two_ranks_give_the_figures_of_one(runs, evaluated, tmp_path):
    expected = evaluated("simulated", "--num_worlds", "3")[1]
    path = tmp_path / "figures_of_two.json"
    flags = ["--num_gpus", "2", "--num_worlds", "3", "--json", path]
    command = start("-m", "agents.evaluate", runs / "simulated", *flags)
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    assert json.loads(path.read_text()) == expected


def test_every_look_at_the_test_span_of_real_prices_is_kept(runs, evaluated, monkeypatch, capsys):
    path, config = runs / "csv" / LOOKS, json.loads((runs / "csv" / "config.json").read_text())
    assert (runs / "csv" / "checkpoints" / "best.pt").exists()
    for number in (1, 2):
        text, figures = evaluated("csv", "--open_test")
        assert "/iteration_" in text.splitlines()[0]  # the last, not the best by its validation
        assert f"look number {number} " in text and list(figures) == ["test"]

    def interrupted(*parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(markets, "report", interrupted)
        assert evaluate_here(monkeypatch, runs / "csv", "--open_test") == 1
    looks = [json.loads(line) for line in path.read_text().splitlines()]
    assert [look["span"] for look in looks] == [figures["test"]["days"]] * 3
    for look in looks:
        assert look["data_digest"] == config["data"]["data_digest"] and look["iteration"] > 0

    # a look that cannot be recorded does not begin
    capsys.readouterr()
    path.unlink()
    path.mkdir()
    monkeypatch.setattr(markets, "report", None)
    assert evaluate_here(monkeypatch, runs / "csv", "--open_test") == 2
    assert str(path) in only_error(capsys.readouterr().err)
    path.rmdir()


def test_daily_returns_weights_and_trades_give_the_figures_of_the_table(runs):
    summary = summary_of(runs / "csv")["train"]
    table = pd.read_csv(runs / "csv" / "evaluation" / "train.csv")
    for name, days in table.groupby("strategy"):
        assert days["date"].iloc[-1] == summary["days"][1] and len(days) == summary["num_days"]
        growth = (1 + days["return"]).prod() - 1
        assert growth == pytest.approx(summary["policies"][name]["cumulative_return"])
    figures = summary["policies"]["policy"]
    days = table[table["strategy"] == "policy"]
    weights, usd = (days.filter(like=f"{kind}:").to_numpy() for kind in ("weight", "usd"))
    assert weights.sum(1).mean() == pytest.approx(figures["exposure"], rel=1e-5)
    assert (usd != 0).sum() == figures["num_trades"] and usd.shape[1] == 5
    assert abs(usd).sum() * 1e-3 == pytest.approx(figures["fees_usd"], rel=1e-4)


def test_equal_weight_on_real_bars_earns_the_mean_of_the_stocks_less_the_fee(runs):
    valid = summary_of(runs / "csv")["valid"]
    held = valid["policies"]["equal weight"]
    bars = pd.read_csv(runs / "five.csv")
    bars = bars[(bars["date"] > valid["days"][0]) & (bars["date"] <= valid["days"][1])]
    stocks = bars.groupby("tic")
    expected = (stocks["close"].last() / stocks["open"].first()).mean() / 1.001 - 1
    assert held["cumulative_return"] == pytest.approx(expected, abs=1e-3)
    assert held["num_trades"] == 5


def test_a_run_does_not_continue_with_prices_that_have_changed(runs, monkeypatch, capsys):
    prices = runs / "five.csv"
    before = prices.read_text()
    prices.write_text(before.rsplit("\n", 6)[0] + "\n")  # without the last day
    try:
        assert train_here(monkeypatch, "--resume", runs / "csv") == 2
    finally:
        prices.write_text(before)
    assert str(prices) in only_error(capsys.readouterr().err)


def test_other_bars_are_evaluated_on_every_tradable_day(runs, evaluated):
    other = ["--data", runs / "other.csv", "--open_test"]
    days = evaluated("csv", *other)[1]["days"]["days"]
    assert days[1] == "2019-07-12" and days[0] < "2018-06-01"
    assert evaluated("simulated", *other)[1]["days"]["days"] == days
    # the same file is that of the run
    assert set(evaluated("csv", "--data", runs / "five.csv")[1]) == {"train", "valid"}


def test_policies_are_compared_in_one_table(runs, evaluated):
    mlp, same = str(runs / "csv_mlp"), str(runs / "csv")
    policies = evaluated("csv", "--compare", mlp, same)[1]["valid"]["policies"]
    assert set(policies) == {"policy", "equal weight", mlp, same}
    assert policies[same] == policies["policy"] != policies[mlp]


def test_a_checkpoint_copied_elsewhere_is_drawn_there(runs, evaluated, tmp_path, monkeypatch):
    copy = tmp_path / "elsewhere" / "best.pt"
    copy.parent.mkdir()
    shutil.copy(latest_checkpoint(runs / "csv"), copy)
    plots = copy.parent / "plots"
    assert evaluated(copy)[1] == evaluated("csv")[1] and (plots / "evaluation.png").exists()
    evaluated(copy, "--plot", tmp_path / "mine.png")
    assert (tmp_path / "mine.png").exists()
    plots.rename(tmp_path / "kept")
    plots.symlink_to(tmp_path / "kept")
    assert evaluate_here(monkeypatch, copy) == 2  # nothing is drawn through a link


def test_a_film_shows_every_step_of_the_episodes_that_are_evaluated(runs, evaluated, tmp_path):
    folder = tmp_path / "new" / "films"
    text, figures = evaluated("fading", "--episodes", "3", "--video", folder)
    lengths = []
    for number in range(3):
        with Image.open(folder / f"episode_{number}.gif") as film:
            assert film.size == (400, 13) and film.info["duration"] == 50
            lengths.append(film.n_frames)
            for age in range(film.n_frames):
                film.seek(age)
                assert (np.asarray(film.convert("RGB")) == 10 * age).all()
    assert len(list(folder.iterdir())) == 3 and len(set(lengths)) > 1
    returns = 2.0 * np.array(lengths)
    expected = {"return": returns.mean(), "return_std": returns.std(), "return_min": returns.min()}
    expected |= {"length": np.mean(lengths), "episodes": 3, "episodes_cut": 0, "env_restarts": 0}
    assert figures["policy"] == pytest.approx(expected)
    assert f"3 episodes without noise: mean return {returns.mean():.2f}" in text


def test_an_episode_without_end_is_cut(evaluated, monkeypatch):
    monkeypatch.setattr(episodes, "MAX_EPISODE_STEPS", 2)
    text, figures = evaluated("fading", "--episodes", "4")
    assert "4 cut after 2 steps" in text and figures["policy"]["length"] == 2.0


@pytest.mark.parametrize("method", ["render", "__init__"])
def test_what_cannot_be_drawn_is_one_line(method, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FadingEnv, method, lambda self: None)
    assert evaluate_here(monkeypatch, runs / "fading", "--video", tmp_path / "films") == 2
    assert "render" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "films").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_an_evaluation_in_one_line(signum, runs, monkeypatch, capsys):
    def interrupted(*args):
        signal.raise_signal(signum)

    run_dir = runs / "fading"
    summary = summary_of(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(episodes, "policy_input", interrupted)
        assert evaluate_here(monkeypatch, run_dir) == 128 + signum
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "stop" in line] == [f"stopped by {signum.name}"]
        assert train_here(monkeypatch, "--resume", run_dir) == 128 + signum
        last = capsys.readouterr().out.splitlines()[-1]
        assert f"stopped by {signum.name}" in last and f"--resume {run_dir}" in last
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert summary_of(run_dir) == summary


REFUSED = [
    ("csv", "--data {}/four.csv --open_test", "trades 5 stocks"),
    ("csv", "--data no_such.csv", "no_such.csv"),
    ("csv", "--data {}/other.csv", "--open_test"),
    ("fading", "--compare {}/csv", "trained on observations of parts"),
    ("csv", "--num_gpus 0", "num_gpus"),
    ("nothing", "", "does not exist"),
    ("five.csv", "", "no checkpoint"),
]


@pytest.mark.parametrize(
    ("run", "flags", "expected"), REFUSED, ids=[f"{run} {flags}" for run, flags, _ in REFUSED]
)
def test_bad_arguments_are_one_line(run, flags, expected, runs, monkeypatch, capsys):
    before = sorted(runs.rglob("*"))
    assert evaluate_here(monkeypatch, runs / run, *flags.format(runs).split()) in (1, 2)
    assert expected in only_error(capsys.readouterr().err)
    assert sorted(runs.rglob("*")) == before


def test_a_failing_environment_is_named_in_one_line(runs, tmp_path, monkeypatch, capsys):
    state = load_checkpoint(latest_checkpoint(runs / "fading"))
    state["config"] = state["config"].replace("Fading-v0", "FadingNan-v0")
    path = save_checkpoint(tmp_path, state, iteration=1, keep=1)
    assert evaluate_here(monkeypatch, path, "--env", "FadingNan-v0") == 1
    assert "FadingNan-v0 number 0 at its step 2" in only_error(capsys.readouterr().err)


def test_a_damaged_best_checkpoint_leaves_the_last_one_evaluated(runs, tmp_path, monkeypatch):
    run_dir = shutil.copytree(runs / "fading", tmp_path / "run")
    (run_dir / "checkpoints" / "best.pt").write_bytes(b"torn")
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert summary_of(run_dir) == summary_of(runs / "fading")
