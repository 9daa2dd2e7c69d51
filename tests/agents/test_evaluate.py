"""The evaluation command: other worlds, data and days; every episode once; refusals."""

import json
import shutil
import signal

import pandas as pd
import pytest
from train_runs import SIZES, SMALL, daily_bars, evaluate_here, only_error, train_here

from agents.evaluate import evaluation, markets
from agents.evaluate.command import LOOKS
from envs.trading import task
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint

BRIEF = ["--validate_every", "0", "--num_episodes", "2"]
NO_VALIDATION = ["--train_end", "2019-01-04", "--test_start", "2019-01-07"]
ROWS = ("policy", "equal weight")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four finished runs, in one folder with the bars they need."""
    folder = tmp_path_factory.mktemp("runs")
    for stocks in (5, 4):
        daily_bars(stocks).to_csv(folder / f"bars{stocks}.csv", index=False)
    daily_bars(5, seed=1).to_csv(folder / "other.csv", index=False)
    csv = [*SIZES, "--num_episodes", "40", "--data", folder / "bars5.csv", "--episode_days", "20"]
    walk = [*SIZES, *BRIEF, "--env", "faulty_envs:Walk-v0", "--eval_episodes", "3"]
    jobs = {
        "simulated": [*SMALL, *BRIEF],
        "csv": csv,
        "csv_mlp": [*csv, "--policy", "mlp", *NO_VALIDATION],
        "walk": walk,
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


def row(text, name):
    shown = next(line for line in text.splitlines() if line.startswith(f"  {name}  "))
    return shown.strip().removeprefix(name).split()


def test_the_table_shows_the_policy_beside_equal_weight_on_worlds_never_seen(runs, evaluated):
    text, figures = evaluated("simulated", "--num_worlds", "3")
    figures = figures["test"]
    assert figures["markets"] == 3 and figures["days"][0] == "2019-06-03"
    policies = figures["policies"]
    assert set(policies) == {*ROWS, "reference", "memoryless rule"}
    for name, found in policies.items():
        assert row(text, name)[:2] == [f"{100 * found['gap_closed']:.0f}", f"{found['sharpe']:.2f}"]
    assert policies["equal weight"]["exposure"] > 0.9
    assert policies["reference"]["gap_closed"] == pytest.approx(1.0)
    assert "SIMULATED" in text and "$" not in text and "annual" not in text
    assert len(figures["ablation"]) == 1 and min(figures["ablation"]) in text
    assert (runs / "simulated" / "plots" / "evaluation.png").stat().st_size > 1000


def test_the_command_repeats_the_figures_at_the_end_of_training(runs, evaluated):
    spans = {"csv": ["train", "valid"], "csv_mlp": ["train"], "simulated": ["test"]}
    for run, names in spans.items():
        flags = ["--num_worlds", "4"] if run == "simulated" else []
        summary = json.loads((runs / run / "summary.json").read_text())
        text, figures = evaluated(run, *flags)
        assert figures == {name: summary[name] for name in names}
        assert ("test" in summary) == (run == "simulated") != ("--open_test" in text)
        assert ("no validation span" in text) == (run == "csv_mlp")
        assert ("fewer than 60 days" in text) == (run == "csv")


def test_the_test_span_of_real_prices_is_opened_by_name_and_every_look_is_kept(runs, evaluated):
    assert (runs / "csv" / "checkpoints" / "best.pt").exists()
    for number in (1, 2):
        text, figures = evaluated("csv", "--open_test")
        assert "/iteration_" in text.splitlines()[0]  # the last, not the best by its validation
        assert f"look number {number} " in text and list(figures) == ["test"]
    looks = [json.loads(line) for line in (runs / "csv" / LOOKS).read_text().splitlines()]
    config = json.loads((runs / "csv" / "config.json").read_text())
    expected = {
        "sharpe": figures["test"]["policies"]["policy"]["sharpe"],
        "span": figures["test"]["days"],
        "data_digest": config["data"]["data_digest"],
        "config_digest": looks[0]["config_digest"],
        "iteration": looks[0]["iteration"],
    }
    assert [look | expected for look in looks] == looks and len(looks) == 2
    assert all(look["time"][:2] == "20" for look in looks)


def test_an_interrupted_look_is_recorded_and_one_that_cannot_be_does_not_begin(
    runs, tmp_path, monkeypatch, capsys
):
    run_dir = shutil.copytree(runs / "csv", tmp_path / "run")
    seen = []

    def interrupted(*parts):
        seen.append(parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(markets, "report", interrupted)
    looks = run_dir / LOOKS
    looks.unlink(missing_ok=True)
    assert evaluate_here(monkeypatch, run_dir, "--open_test") == 1
    (look,) = map(json.loads, looks.read_text().splitlines())
    assert look["sharpe"] is None and look["span"][0] < look["span"][1]
    looks.unlink()
    looks.mkdir()
    assert evaluate_here(monkeypatch, run_dir, "--open_test") != 0 and len(seen) == 1
    assert str(looks) in capsys.readouterr().err


def test_daily_returns_weights_and_trades_give_the_figures_of_the_table(runs):
    summary = json.loads((runs / "csv" / "summary.json").read_text())["train"]
    table = pd.read_csv(runs / "csv" / "evaluation" / "train.csv")
    for name, days in table.groupby("strategy"):
        assert days["date"].iloc[-1] == summary["days"][1] and len(days) == summary["num_days"]
        growth = (1 + days["return"]).prod() - 1
        assert growth == pytest.approx(summary["policies"][name]["cumulative_return"])
    figures = summary["policies"]["policy"]
    weights, usd = (
        table[table["strategy"] == "policy"].filter(like=f"{kind}:").to_numpy()
        for kind in ("weight", "usd")
    )
    assert weights.sum(1).mean() == pytest.approx(figures["exposure"], rel=1e-5)
    assert (usd != 0).sum() == figures["num_trades"] and usd.shape[1] == 5
    assert abs(usd).sum() * 1e-3 == pytest.approx(figures["fees_usd"], rel=1e-4)


def test_equal_weight_on_real_bars_earns_the_mean_of_the_stocks_less_the_fee(runs, evaluated):
    days = ["--start", "2019-04-01", "--end", "2019-07-01"]
    text, figures = evaluated("csv", *days, "--open_test")
    figures = figures["days"]
    assert figures["days"] == days[1::2] and figures["markets"] == 1 and "SIMULATED" not in text
    assert set(figures["policies"]) == set(ROWS)
    bars = pd.read_csv(runs / "bars5.csv")
    bars = bars[(bars["date"] > days[1]) & (bars["date"] <= days[3])].groupby("tic")
    expected = (bars["close"].last() / bars["open"].first()).mean() / 1.001 - 1
    equal_weight = figures["policies"]["equal weight"]
    assert equal_weight["cumulative_return"] == pytest.approx(expected, abs=1e-3)
    assert equal_weight["num_trades"] == 5


def test_a_run_does_not_go_on_with_prices_that_have_changed(runs, monkeypatch, capsys):
    """New bars would move the days of training, validation and test."""
    prices = runs / "bars5.csv"
    before = prices.read_text()
    prices.write_text(before.rsplit("\n", 6)[0] + "\n")  # without the last day
    try:
        assert train_here(monkeypatch, "--resume", runs / "csv") == 2
    finally:
        prices.write_text(before)
    assert f"{prices} has changed since this run began" in only_error(capsys.readouterr().err)
    assert train_here(monkeypatch, "--resume", runs / "csv") == 0


def test_other_bars_are_evaluated_on_every_tradable_day(runs, evaluated):
    other = ["--data", runs / "other.csv", "--open_test"]
    days = evaluated("csv", *other)[1]["days"]["days"]
    assert days[1] == "2019-07-12" and days[0] < "2018-06-01"
    assert evaluated("simulated", *other)[1]["days"]["days"] == days
    # the same file is that of the run
    assert set(evaluated("csv", "--data", runs / "bars5.csv")[1]) == {"train", "valid"}
    assert set(evaluated("csv", "--start", "2018-06-01", "--end", "2018-09-03")[1]) == {"days"}


def test_policies_are_compared_in_one_table(runs, evaluated):
    mlp, same = str(runs / "csv_mlp"), str(runs / "csv")
    figures = evaluated("csv", "--compare", mlp, same)[1]["valid"]["policies"]
    assert set(figures) == {*ROWS, mlp, same}
    assert figures[same] == figures["policy"] != figures[mlp]
    assert len(figures["policy"]["against_equal_weight"]["sharpe"]) == 3


def test_a_checkpoint_copied_elsewhere_is_drawn_there(runs, evaluated, tmp_path, monkeypatch):
    copy = tmp_path / "elsewhere" / "best.pt"
    copy.parent.mkdir()
    shutil.copy(latest_checkpoint(runs / "csv"), copy)
    plots = copy.parent / "plots"
    assert evaluated(copy)[1] == evaluated("csv")[1] and (plots / "evaluation.png").exists()
    evaluated(copy, "--plot", tmp_path / "own.png")
    assert (tmp_path / "own.png").exists()
    plots.rename(tmp_path / "kept")
    plots.symlink_to(tmp_path / "kept")
    assert evaluate_here(monkeypatch, copy) == 2  # nothing is drawn through a link


def test_episodes_of_another_environment_are_each_counted_once(runs, evaluated, monkeypatch):
    text, figures = evaluated("walk", "--episodes", "7")
    expected = {"return": 9.0, "return_std": 0.0, "return_min": 9.0, "length": 9.0, "episodes": 7.0}
    expected |= {"return_with_noise": 9.0, "episodes_cut": 0.0, "env_restarts": 0.0}
    assert figures["policy"] == expected
    assert "7 episodes without noise: mean return 9.00" in text and "cut" not in text
    monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 5)
    text, figures = evaluated("walk", "--episodes", "4")
    assert "4 cut after 5 steps" in text and figures["policy"]["length"] == 5.0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_an_evaluation_in_one_line(signum, runs, monkeypatch, capsys):
    def interrupted(*args):
        signal.raise_signal(signum)

    summary = (runs / "walk" / "summary.json").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "policy_input", interrupted)
        assert evaluate_here(monkeypatch, runs / "walk") == 128 + signum
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "stop" in line] == [f"stopped by {signum.name}"]
        assert train_here(monkeypatch, "--resume", runs / "walk") == 128 + signum
        last = capsys.readouterr().out.splitlines()[-1]
        assert f"stopped by {signum.name}" in last and f"--resume {runs / 'walk'}" in last
    assert train_here(monkeypatch, "--resume", runs / "walk") == 0
    assert (runs / "walk" / "summary.json").read_text() == summary


REFUSED = [
    ("csv", "--data {}/bars4.csv --open_test", "trades 5 stocks and the data has 4"),
    ("csv", "--data no_such.csv", "no such file"),
    ("csv", "--start 2019-05-01 --end 2019-04-01", "fewer than 2 tradable days"),
    ("csv", "--start 2019-01-02", "--open_test"),
    ("csv", "--data {}/other.csv", "--open_test"),
    ("walk", "--compare {}/csv", "trained on observations of parts"),
    ("csv", "--num_gpus 0", "num_gpus must be"),
    ("nothing", "", "does not exist"),
    ("bars5.csv", "", "no checkpoint"),
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
    agent = latest_checkpoint(runs / "walk")
    state = load_checkpoint(agent)
    state["config"] = state["config"].replace("Walk-v0", "NanAtFive-v0")
    path = save_checkpoint(tmp_path, state, iteration=1, keep=1)
    assert evaluate_here(monkeypatch, path, "--env", "faulty_envs:NanAtFive-v0") == 1
    named = "faulty_envs:NanAtFive-v0 number 0 at its step 5: observation is nan"
    assert named in only_error(capsys.readouterr().err)
