"""Test the evaluation command: simulated and real prices, episodes, videos."""

import json
import shutil
import signal

import gymnasium
import numpy as np
import pandas as pd
import pytest
from gymnasium import spaces
from PIL import Image
from train_runs import SIZES, SMALL, daily_bars, evaluate_here, printed_error, start, train_here

from agents.evaluate import pictures
from agents.learner import controller
from envs.gym_task import GymTask
from envs.pictures import picture
from envs.task import TaskConfig, TaskSettings
from envs.trading import task
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint
from rl_dist.files import read_object
from rl_dist.run_dir import RunDir

BRIEF = ["--validate_every=0", "--num_episodes=2"]
NO_VALIDATION = ["--train_end=2019-01-04", "--test_start=2019-01-07"]


class FadingEnv(gymnasium.Env):
    """Environment with random episode lengths; its image gets brighter at each step."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

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
        frame = np.full((3, 9, 3), 10 * self.age, np.uint8)
        return [frame] if self.age else frame


gymnasium.register("Fading-v0", FadingEnv)
gymnasium.register("FadingNan-v0", FadingEnv, kwargs={"nan_at": 2})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train four small runs in one folder, which also holds their price file."""
    folder = tmp_path_factory.mktemp("runs")
    daily_bars(5).to_csv(folder / "five.csv", index=False)
    csv = [*SIZES, "--num_episodes=40", "--data", folder / "five.csv", "--episode_days=20"]
    jobs = {
        "simulated": [*SMALL, *BRIEF],
        "csv": csv,
        "csv_mlp": [*csv, "--policy=mlp", *NO_VALIDATION],
        "fading": [*SIZES, *BRIEF, "--env=Fading-v0", "--eval_episodes=3"],
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(task, "NUM_TEST_WORLDS", 4)
        for name, flags in jobs.items():
            assert train_here(*flags, "--run_dir", folder / name) == 0, name
    return folder


@pytest.fixture
def evaluated(runs, tmp_path, capsys):
    """Return a function that evaluates a run and returns (stdout, figures)."""

    def call(run, *flags):
        file = tmp_path / "figures.json"
        code = evaluate_here(runs / run, "--json", file, *flags)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out, json.loads(file.read_text())

    return call


def summary_of(run_dir):
    return read_object(run_dir / "summary.json")


def test_the_policy_is_compared_with_rules_and_its_zeroed_state_in_unseen_worlds(runs, evaluated):
    text, figures = evaluated("simulated", "--num_worlds=3")
    summary = figures["test"]
    policies = summary["policies"]
    assert summary["markets"] == 3 and summary["days"][0] == "2019-06-03"
    rules = {"equal weight", "reference", "memoryless rule"}
    assert policies.keys() == {"policy", task.ZEROED} | rules
    assert policies["policy"]["sharpe"] != policies[task.ZEROED]["sharpe"]
    assert policies["equal weight"]["exposure"] > 0.9
    assert policies["reference"]["gap_closed"] == pytest.approx(1.0)
    assert "SIMULATED" in text and "annual" not in text
    assert (runs / "simulated" / "plots" / "evaluation.png").stat().st_size > 1000


def test_the_command_repeats_the_figures_of_the_training_also_on_two_ranks(
    runs, evaluated, tmp_path
):
    spans = {"csv": ["train", "valid"], "csv_mlp": ["train"], "simulated": ["test"]}
    for run, names in spans.items():
        summary = summary_of(runs / run)
        text, figures = evaluated(run, "--num_worlds=4")
        assert figures == {span: summary[span] for span in names}
        assert ("test" in summary) == (run == "simulated") != ("--open_test" in text)
    path = tmp_path / "figures_of_two.json"
    flags = ["--num_gpus=2", "--num_worlds=4", "--json", path]
    command = start("-m", "agents.evaluate", runs / "simulated", *flags)
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    assert json.loads(path.read_text()) == figures


def test_every_evaluation_on_the_test_span_of_real_prices_is_recorded(
    runs, evaluated, monkeypatch, capsys
):
    path, config = RunDir(runs / "csv").test_looks, read_object(runs / "csv" / "config.json")
    assert (runs / "csv" / "checkpoints" / "best.pt").exists()
    text, figures = evaluated("csv", "--open_test")
    assert "data: 5 stocks" in text
    # The test span is evaluated with the last checkpoint, not with best.pt.
    assert "/iteration_" in text.splitlines()[0]
    assert "evaluation 1 on the test span" in text and list(figures) == ["test"]
    monkeypatch.setattr(task, "run_markets", None)
    assert evaluate_here(runs / "csv", "--open_test") == 1
    for line in path.read_text().splitlines():
        look = json.loads(line)
        assert look["span"] == figures["test"]["days"] and look["iteration"] > 0
        assert look["data_digest"] == config["data"]["data_digest"]
    assert "evaluation 2 on the test span" in capsys.readouterr().out

    # The command refuses to evaluate on the test span if it cannot record the evaluation.
    path.unlink()
    path.mkdir()
    assert evaluate_here(runs / "csv", "--open_test") == 2
    assert str(path) in printed_error(capsys)
    path.rmdir()


def test_two_processes_record_one_look_at_the_test_span(runs):
    looks = RunDir(runs / "csv_mlp").test_looks
    command = start("-m", "agents.evaluate", runs / "csv_mlp", "--open_test", "--num_gpus=2")
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 0, errors
    assert len(looks.read_text().splitlines()) == 1
    looks.unlink()


def test_daily_figures_on_real_bars_add_up_to_the_table_and_equal_weight_is_known(runs):
    summary = summary_of(runs / "csv")["valid"]
    table = pd.read_csv(runs / "csv" / "evaluation" / "valid.csv")
    for name, days in table.groupby("strategy"):
        assert days["date"].iloc[-1] == summary["days"][1] and len(days) == summary["num_days"]
        growth = (1 + days["return"]).prod() - 1
        assert growth == pytest.approx(summary["policies"][name]["cumulative_return"])
    figures, held = (summary["policies"][name] for name in ("policy", "equal weight"))
    days = table[table["strategy"] == "policy"]
    weights, usd = (days.filter(like=f"{kind}:").to_numpy() for kind in ("weight", "usd"))
    assert weights.sum(1).mean() == pytest.approx(figures["exposure"], rel=1e-5)
    assert (usd != 0).sum() == figures["num_trades"]
    assert abs(usd).sum() * 1e-3 == pytest.approx(figures["fees_usd"], rel=1e-4)
    # The equal-weight strategy buys at the first open price and pays a fee of 0.1 %.
    bars = pd.read_csv(runs / "five.csv")
    stocks = bars[bars["date"].between(days["date"].iloc[0], summary["days"][1])].groupby("tic")
    expected = (stocks["close"].last() / stocks["open"].first()).mean() / 1.001 - 1
    assert held["cumulative_return"] == pytest.approx(expected, abs=1e-3)


def test_a_run_does_not_continue_with_changed_prices(runs, capsys):
    prices = runs / "five.csv"
    before = prices.read_text()
    prices.write_text(before.rsplit("\n", 6)[0] + "\n")  # remove the bars of the last day
    try:
        assert train_here("--resume", runs / "csv") == 2
    finally:
        prices.write_text(before)
    assert str(prices) in printed_error(capsys)


def test_policies_are_compared_and_a_copied_checkpoint_can_be_plotted(runs, evaluated, tmp_path):
    copy = shutil.copy(latest_checkpoint(runs / "csv"), tmp_path / "best.pt")
    mlp, original = str(runs / "csv_mlp"), str(runs / "csv")
    policies = evaluated(copy, "--compare", mlp, original)[1]["valid"]["policies"]
    assert policies[original] == policies["policy"] != policies[mlp]
    assert (tmp_path / "plots" / "evaluation.png").exists()
    evaluated(copy, "--plot", tmp_path / "mine.png")
    assert (tmp_path / "mine.png").exists()


def test_a_video_shows_every_step_of_the_first_evaluated_episode(evaluated, tmp_path):
    folder = tmp_path / "films"
    folder.mkdir()
    (folder / "episode_0.gif").write_text("an older video")
    figures = evaluated("fading", "--video", folder)[1]["policy"]
    assert (folder / "episode_0.gif").read_text() == "an older video" and figures["episodes"] == 1
    with Image.open(folder / "episode_1.gif") as film:
        length = film.n_frames
        assert film.info["duration"] == 1000 / FadingEnv.metadata["render_fps"]
        for age in range(length):
            film.seek(age)
            assert (np.asarray(film.convert("RGB")) == 10 * age).all()
    assert figures["return"] == figures["return_min"] == 2.0 * length == 2.0 * figures["length"]


SHADES = np.array([[0, 1], [0, 0]])


@pytest.mark.parametrize(
    "drawn", [255 * SHADES, SHADES.astype(float), SHADES > 0, 255.0 * SHADES[:, :, None]]
)
def test_render_may_return_numbers_of_any_type(drawn):
    shown = np.asarray(picture(drawn).convert("L"))
    assert shown.tolist() == (255 * SHADES).tolist()


@pytest.mark.parametrize("drawn", [None, "ansi", np.zeros((3, 8, 9), np.uint8)])
def test_what_is_no_picture_is_a_one_line_error(drawn, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FadingEnv, "render", lambda env: drawn)
    assert evaluate_here(runs / "fading", "--video", tmp_path) == 2
    assert "render" in printed_error(capsys)


@pytest.mark.parametrize(
    "run, flags, expected",
    [
        ("fading", "--compare {}/csv", "trained on observations with the parts"),
        ("five.csv", "", "/five.csv"),
        ("nan.pt", "--env FadingNan-v0", "FadingNan-v0 number 0 at its step 2"),
    ],
)
def test_a_run_that_cannot_be_evaluated_is_a_one_line_error(run, flags, expected, runs, capsys):
    state = load_checkpoint(latest_checkpoint(runs / "fading"))
    state["config"] = state["config"].replace("Fading-v0", "FadingNan-v0")
    save_checkpoint(runs, state, iteration=1, keep=1).rename(runs / "nan.pt")
    before = sorted(runs.rglob("*"))
    assert evaluate_here(runs / run, *flags.format(runs).split()) in (1, 2)
    assert expected in printed_error(capsys)
    assert sorted(runs.rglob("*")) == before


def test_a_stop_signal_ends_an_evaluation_in_one_line(runs, monkeypatch, capsys):
    run_dir = runs / "fading"
    summary, resume = summary_of(run_dir), ["--resume", run_dir]
    for call, flags, stop in (
        (evaluate_here, [run_dir], signal.SIGINT),
        (train_here, resume, signal.SIGTERM),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(controller, "policy_input", lambda *_, n=stop: signal.raise_signal(n))
            assert call(*flags) == 128 + stop
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "stopped by" in line] == [lines[-1]]
        assert stop.name in lines[-1]
    assert train_here(*resume) == 0
    assert summary_of(run_dir) == summary


def test_the_learning_curve_has_a_dot_for_each_measurement_and_no_other(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    records = [
        {"iteration": n, "global_step": n, "episode/return": n % 3 or None} for n in range(9)
    ]
    records[2]["valid/return"] = records[7]["valid/return"] = 1.0
    run.write_records(records)
    monkeypatch.setattr(pictures.plt, "close", lambda: None)
    settings = TaskSettings(task=TaskConfig(env="Fading-v0"))
    pictures.plot_learning_curve(run, "title", GymTask(settings))
    dots = [
        np.isfinite(line.get_ydata()).sum()
        for axes in pictures.plt.gcf().axes
        for line in axes.lines
        if line.get_marker() == "."
    ]
    assert dots == [6, 2]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("length", [1, 200])
def test_drawing_a_learning_curve_of_any_length_gives_no_warning(length, tmp_path):
    run = RunDir(tmp_path)
    steps = range(length)
    run.write_records([{"iteration": n, "global_step": n, "episode/return": 1.0} for n in steps])
    settings = TaskSettings(task=TaskConfig(env="Fading-v0"))
    pictures.plot_learning_curve(run, "title", GymTask(settings))
    assert run.picture("learning_curve").exists()
