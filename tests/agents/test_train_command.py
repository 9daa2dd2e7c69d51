"""Test the training command: run files, metrics, resume, errors, help, presets.

Also test user code, the best checkpoint and initial weights.
"""

import contextlib
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from hostile import damage
from tensorboard_readers import scalars
from train_runs import (
    REPO,
    SIZES,
    SMALL,
    evaluate_here,
    iterations,
    output_in,
    printed_error,
    records,
    train_here,
)

from agents.config import DEFAULTS, MEMORY_TASKS, OWNERS, PRESETS, PURPOSES, QUICK
from agents.learner.settings import AUTO_INTERVAL
from agents.learner.sizes import shard_sizes
from agents.learner.trainer import Training
from agents.run.choice import choose_run, fresh_config, parse_training
from agents.run.metric_table import METRIC_TABLE
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, pack, write_atomically
from rl_dist.files import read_object
from rl_dist.resume_check import differences, result_of

OFTEN = ["--validate_every=3", "--checkpoint_every=1", "--keep_checkpoints=100"]
CARTPOLE = [*SIZES[2:], "--env=CartPole-v1", "--eval_episodes=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train on 1 rank and on 2; return {num_ranks: (run directory, stdout, stderr)}."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*SMALL, *OFTEN, "--precision=fp64", "--device=cpu"]
    ended = {}
    for ranks in (1, 2):
        run_dir = folder / str(ranks)
        with output_in(folder):
            code = train_here(*flags, "--num_gpus", ranks, "--run_dir", run_dir)
        ended[ranks] = run_dir, *((folder / name).read_text() for name in ("out", "err"))
        assert code == 0, ended[ranks]
    return ended


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """Train CartPole-v1 and save a best checkpoint; return the run directory."""
    run_dir = tmp_path_factory.mktemp("cartpole") / "run"
    flags = [*CARTPOLE, "--total_steps=384", "--validate_every=1", "--learning_rate=0.003"]
    assert train_here(*flags, "--run_dir", run_dir) == 0
    return run_dir


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def read(run_dir, name):
    return read_object(run_dir / f"{name}.json")


@pytest.fixture(params=[1, 2])
def run(request, finished):
    """Return the number of ranks of a finished run, its directory, stdout and stderr."""
    return request.param, *finished[request.param]


@pytest.fixture
def lines(run):
    """Return the records of a finished run."""
    _, run_dir, _, _ = run
    return records(run_dir)


def test_ranks_over_gloo_train_on_a_cpu_as_by_default(finished, tmp_path):
    by_default, _, _ = finished[2]
    flags = [*SMALL, *OFTEN, "--precision=fp64", "--device=cpu", "--num_gpus=2", "--backend=gloo"]
    assert train_here(*flags, "--run_dir", tmp_path / "run") == 0
    assert differences(result_of(by_default), result_of(tmp_path / "run")) == []


def test_a_run_prints_its_data_and_directory_and_no_error(run):
    _, run_dir, out, err = run
    assert "error" not in err.lower() and "Traceback" not in err, err
    assert out.count("data: ") == 1 and "SIMULATED" in out and str(run_dir) in out


def test_a_run_writes_exactly_the_promised_files(run):
    ranks, run_dir, _, _ = run
    (events,) = (name for name in names(run_dir) if name.startswith("events.out.tfevents"))
    expected = {"checkpoints", "config.json", "evaluation", "logs", "metrics.jsonl", "plots"}
    assert set(names(run_dir)) == expected | {"state.json", "summary.json", events}
    assert names(run_dir / "plots") == ["equity.png", "learning_curve.png"]
    assert names(run_dir / "logs") == [f"rank_{rank}.log" for rank in range(ranks)]


def test_only_a_run_of_several_ranks_reports_its_scaling(run):
    ranks, run_dir, out, _ = run
    assert ("scaling" in read(run_dir, "summary")) == (ranks == 2) == ("steps/s on 2 ranks" in out)


def test_each_iteration_leaves_one_record_and_one_checkpoint(run):
    _, run_dir, _, _ = run
    numbers = iterations(run_dir)
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3
    saved = [f"iteration_{number:08d}.pt" for number in numbers]
    assert names(run_dir / "checkpoints") == ["best.pt", *saved]


def test_the_totals_of_a_record_cover_all_ranks(run, lines):
    ranks, _, _, _ = run
    for line in lines:
        assert line["global_step"] == 128 * line["iteration"]
        assert sum(entry["episode/count"] for entry in line["ranks"]) == line["episode/count"]
        assert len(line["ranks"]) == ranks


def test_validation_runs_every_third_iteration_and_in_the_last(lines):
    for line in lines:
        assert ("valid/sharpe" in line) == (line["iteration"] % 3 == 0 or line is lines[-1])


def test_training_ends_when_the_budget_of_episodes_is_reached(lines):
    total = lines[-1]["episode/total"]
    assert lines[-2]["episode/total"] < 8 <= total == sum(line["episode/count"] for line in lines)


def test_tensorboard_shows_the_recorded_losses(run, lines):
    _, run_dir, _, _ = run
    expected = [(line["global_step"], pytest.approx(line["loss/policy"])) for line in lines]
    assert scalars(run_dir)["loss/policy"] == expected


def test_a_run_writes_exactly_the_metrics_of_the_table(finished, cartpole):
    cartpole_kinds = ("other environments", "discrete actions")
    for path, task in ((cartpole, cartpole_kinds), (finished[1][0], ("StockTrading-v0",))):
        last, kept = records(path)[-1], ("", *task, "--monitor_every")
        written = {name: metric for name, metric in METRIC_TABLE.items() if metric.when in kept}
        assert set(last) == {name for name, metric in written.items() if metric.place != "ranks"}
        per_rank = {name for name, metric in written.items() if metric.place != "record"}
        assert set(last["ranks"][0]) == per_rank


def test_two_ranks_train_and_evaluate_as_one(finished):
    results = [result_of(run_dir) for run_dir, *_ in finished.values()]
    assert differences(*results, 1e-6) == []


def test_a_core_and_a_callback_can_be_in_the_current_directory(tmp_path, monkeypatch):
    shutil.copy(REPO / "tests/own_cores.py", tmp_path / "cores_here.py")
    (tmp_path / "calls_here.py").write_text("def stop(moment):\n    return False\n")
    monkeypatch.chdir(tmp_path)
    core = [*CARTPOLE, "--policy=own", "--core=cores_here:Decay", "--total_steps=256"]
    for words in (
        [*core, "--callback=calls_here:stop", "--run_dir=run"],
        ["--resume=run"],
    ):
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
        assert train_here(*words) == 0
    assert iterations("run") == [1, 2]


# ---- the best checkpoint, and initial weights


def evaluated(cartpole, folder, *flags):
    assert evaluate_here(cartpole, *flags, "--json", folder / "json") == 0
    return read_object(folder / "json")["policy"]


def test_the_best_policy_is_evaluated_by_default(cartpole, tmp_path, capsys):
    assert evaluated(cartpole, tmp_path) == read(cartpole, "summary")["best"]
    assert "checkpoints/best.pt" in capsys.readouterr().out


def test_the_last_policy_is_evaluated_on_request(cartpole, tmp_path):
    summary = read(cartpole, "summary")
    assert evaluated(cartpole, tmp_path, "--which=last") == summary["test"] != summary["best"]


def test_evaluations_with_different_seeds_draw_different_episodes(cartpole, tmp_path):
    assert evaluated(cartpole, tmp_path, "--seed=2") != read(cartpole, "summary")["best"]


def test_validation_draws_other_episodes_than_evaluation(cartpole):
    last, chosen_by = read(cartpole, "summary")["test"], records(cartpole)[-1]
    assert any(chosen_by[f"valid/{name}"] != last[name] for name in ("return", "return_std"))


def test_a_run_with_a_damaged_best_checkpoint_still_ends(cartpole, tmp_path, capsys):
    run_dir = shutil.copytree(cartpole, tmp_path / "run")
    damage(run_dir / "checkpoints" / "best.pt")
    assert train_here("--resume", run_dir) == 0
    assert str(run_dir / "checkpoints" / "best.pt") in capsys.readouterr().out
    assert "best" not in read(run_dir, "summary")


@pytest.fixture(scope="module")
def from_another(cartpole, tmp_path_factory):
    """Train one iteration from the weights of `cartpole`.

    Return the flags, the checkpoint that the run starts from, and the one that it saves.
    """
    flags = [*CARTPOLE, "--init_from", cartpole, "--learning_rate=0", "--total_steps=128"]
    run_dir = tmp_path_factory.mktemp("from_another")
    assert train_here(*flags, "--run_dir", run_dir) == 0
    paths = cartpole / "checkpoints/best.pt", latest_checkpoint(run_dir)
    return flags, *map(load_checkpoint, paths)


def test_a_run_starts_from_the_weights_of_another(from_another):
    _, first, then = from_another
    assert then["iteration"] == 1
    for name, weight in first["policy"].items():
        assert (then["policy"][name] == weight).all(), name


def test_a_run_adds_to_the_statistics_of_another(from_another):
    first, then = (state["normalizers"]["obs.moments.count"] for state in from_another[1:])
    assert then == first + 128


@pytest.mark.parametrize(
    "other, word",
    [("--hidden_size=16", "--hidden_size"), ("--init_from=odd.pt", "obs.moments.mean")],
)
def test_initial_weights_that_do_not_fit_are_refused(
    other, word, from_another, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags, first, _ = from_another
    means = {"obs.moments.mean": torch.zeros(9)}
    odd = first | {"normalizers": first["normalizers"] | means}
    write_atomically(tmp_path / "odd.pt", pack(odd))
    assert train_here(*flags, other, "--run_dir", tmp_path / "no") == 2
    assert word in printed_error(capsys)


# ---- resume


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished, tmp_path, capsys):
    whole, again = finished[1][0], tmp_path / "again"
    shutil.copytree(whole, again)
    for path in (again / "checkpoints").iterdir():
        if path.name > "iteration_00000003.pt":
            path.unlink()
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99, "torn')
    assert train_here("--resume", again) == 0, capsys.readouterr().err
    assert read(again, "config")["train"] == read(whole, "config")["train"]
    assert differences(result_of(whole), result_of(again)) == []
    assert (whole / "summary.json").read_text() == (again / "summary.json").read_text()


def test_the_first_stop_signal_is_acknowledged_before_the_iteration_ends(
    tmp_path, monkeypatch, capfd
):
    update = Training.update

    def interrupted(training, rollout):
        signal.raise_signal(signal.SIGINT)
        assert "SIGINT: saving after this iteration" in capfd.readouterr().err
        return update(training, rollout)

    monkeypatch.setattr(Training, "update", interrupted)
    flags = [*CARTPOLE, "--num_episodes=99", "--run_dir", tmp_path]
    assert train_here(*flags) == 128 + signal.SIGINT
    assert latest_checkpoint(tmp_path).name == "iteration_00000001.pt"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Begin a run with `--resume auto`; return its directory, flags and records."""
    run_dir = tmp_path_factory.mktemp("begun")
    # A run that is killed before its first checkpoint leaves these files.
    (run_dir / "config.json").write_text('{"train": {}}')
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    flags = [*CARTPOLE, "--checkpoint_every=1", "--run_dir", run_dir, "--resume=auto"]
    assert train_here(*flags, "--num_episodes=2") == 0
    return run_dir, flags, records(run_dir)


def test_resume_auto_begins_a_run_that_has_no_checkpoint(begun):
    numbers = [line["iteration"] for line in begun[2]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_resume_auto_continues_a_run_with_a_checkpoint(begun):
    run_dir, flags, first = begun
    budget = first[-1]["episode/total"] + 1
    assert train_here(*flags, "--num_episodes", budget) == 0
    second = records(run_dir)
    assert second[: len(first)] == first and len(second) > len(first)
    assert read(run_dir, "summary")["iteration"] == second[-1]["iteration"]


# ---- bad input


REFUSED = [  # (flags, [parts of the error line: the field, the value or the fix])
    ("--interactive", ["--interactive"]),  # needs a terminal; tests have none
    ("--num_steps 33", ["num_steps 33", "bptt_steps"]),
    ("--num_gpus 3 --device cpu", ["batch_size", "3 rank(s)", "--batch_size"]),
    ("--backend nccl --device cpu", ["backend nccl", "use gloo"]),
    ("--env Nope-v9", ["Nope-v9"]),
    ('CARTPOLE --env_kwargs {"colour":1}', ["colour"]),
    ("CARTPOLE --policy own --core own_cores:Prophet", ["looks ahead"]),
    ("CARTPOLE --encoder own_encoders:Numberless", ["encoder", "num_outputs"]),
    ("CARTPOLE --encoder own_encoders:Mixing", ["'own_encoders:Mixing' mixes rows"]),
    ("CARTPOLE --encoder nowhere:E --pretrained .", ["pretrained", "--encoder"]),
    ("CARTPOLE --callback nowhere:call", ["nowhere:call"]),
    ("CARTPOLE --stop_at valid/retrun 3", ["stop_at", "valid/retrun", "valid/return"]),
    ("CARTPOLE --validate_every 0 --stop_at valid/return 3", ["stop_at", "--validate_every"]),
    ("--data no_such.csv", ["no_such.csv"]),
    ("--preset massive", ["preset massive", "StockTrading-v0"]),
    ("CARTPOLE --preset paper", ["preset paper", "CartPole-v1"]),
    ("CARTPOLE --init_from a --pretrained b", ["init_from", "pretrained"]),
    ("--resume no_such_run", ["no_such_run"]),
    ("--seeds 1 x", ["seeds", "'1 x'"]),
    ("CARTPOLE --num_envs 10000000", ["GiB", "--num_envs"]),
]


@pytest.mark.parametrize("flags, named", REFUSED, ids=[flags for flags, _ in REFUSED])
def test_bad_input_is_a_one_line_error_and_leaves_no_files(
    flags, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(flags.replace("CARTPOLE", "--env CartPole-v1"))
    assert train_here(*SIZES[:2], *SIZES[-2:], *words) == 2
    line = printed_error(capsys)
    assert [part for part in named if part not in line] == [], line
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


def test_the_users_own_files_in_a_run_directory_are_left_alone(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    mine = tmp_path / "logs/mine.txt"
    mine.write_text("mine")
    for where, env in (
        (mine / "below", "CartPole-v1"),
        (tmp_path / "logs", "CartPole-v1"),
        (tmp_path, "misbehaving_envs:Missing-v0"),
    ):
        assert train_here(*SIZES, "--env", env, "--run_dir", where) == 2
        printed_error(capsys)
        assert mine.read_text() == "mine" and names(tmp_path) == ["logs"]


@pytest.fixture
def faulty(tmp_path, capsys):
    """Start a run whose environment raises an error; return its directory, flags and error."""
    run_dir = tmp_path / "run"
    flags = [*SIZES, "--eval_episodes=2", "--run_dir", run_dir, "--env"]
    assert train_here(*flags, "misbehaving_envs:Raises-v0") == 1
    return run_dir, flags, printed_error(capsys)


def test_a_fault_of_an_environment_is_one_line_that_names_the_log(faulty):
    _, _, line = faulty
    assert "KeyError: 'no such price' (misbehaving_envs.py:" in line and "logs/rank_0.log" in line


def test_the_traceback_of_an_environment_is_in_the_log_alone(faulty):
    run_dir, _, _ = faulty
    assert names(run_dir) == ["logs"]
    assert "in step" in (run_dir / "logs/rank_0.log").read_text()


def test_the_directory_of_a_failed_start_can_be_used_again(faulty):
    run_dir, flags, _ = faulty
    assert train_here(*flags, "misbehaving_envs:Misbehaving-v0") == 0
    assert read(run_dir, "summary")["test"]["return"] == 7.0


def test_a_fresh_start_or_a_bad_resume_does_not_touch_another_run(finished, capsys):
    run_dir = finished[1][0]
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for flags, named in [
        (["--run_dir", run_dir], f"--resume {run_dir}"),
        (["--resume", run_dir, "--hidden_size=16"], "hidden_size 16 (the checkpoint has 8)"),
        (["--resume", run_dir / "checkpoints"], f"{run_dir}/checkpoints"),
    ]:
        assert train_here(*flags) == 2
        assert named in printed_error(capsys)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


# ---- flags, help and presets


def config_from(flags):
    with contextlib.ExitStack() as held:
        return choose_run(parse_training(shlex.split(flags)), held).config


@pytest.mark.parametrize(
    "flags, idle",
    [
        ("--env CartPole-v1 --fee_bps 3 --market_seed 2 --seed 5", {"fee_bps", "market_seed"}),
        ("--data PRICES --market_edge 3 --eval_episodes 3", {"market_edge", "eval_episodes"}),
        ("--total_steps 1000 --num_episodes 3", {"num_episodes"}),
        ("--env Recall-v0 --policy mlp --refresh_states", {"refresh_states"}),
        ("--strategy hybrid --hybrid_form pipeline --shard_size 2", {"shard_size"}),
    ],
)
def test_flags_without_effect_are_named_and_stay_at_their_default(flags, idle, tmp_path, capsys):
    (tmp_path / "prices").touch()
    flags = flags.replace("PRICES", str(tmp_path / "prices"))
    values = config_from(flags).values
    assert set(re.findall(r"--(\w+)", capsys.readouterr().out)) == idle
    assert {name: values[name] for name in idle} == {name: DEFAULTS[name] for name in idle}


def test_help_shows_the_fifteen_flags_that_matter(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_training(["--help"])
    shown = OWNERS.keys() & re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) == 15 and shown > {"env", "num_gpus", "num_episodes", "batch_size"}


def test_a_run_can_print_what_each_preset_is_for():
    assert PURPOSES.keys() == PRESETS.keys()


def test_memory_tasks_are_recognised_by_their_ids():
    ids = (
        "Recall-v0",
        "envs:Recall-v0",
        "popgym-RepeatFirstEasy-v0",
        "a.b:popgym-StatelessCartPole-v0",
    )
    others = ("NoRecall-v0", "my_popgym:make_env", "popgym_arcade:Tetris-v0", "CartPole-v1")
    assert all(map(MEMORY_TASKS.fullmatch, ids)) and not any(map(MEMORY_TASKS.fullmatch, others))


@pytest.mark.parametrize(
    "flags, kind, changes",  # kind: name of a preset; changes: values that differ from it
    [
        ("", "trading", {}),
        ("--preset paper --quick", "paper", QUICK),
        ("--env CartPole-v1", "small", {}),
        ("--env Pendulum-v1 --total_steps 9", "control", {"total_steps": 9}),
        ("--env envs:Recall-v0", "memory", {}),
        ("--env Recall-v0 --num_episodes 9", "memory", {"total_steps": 0, "num_episodes": 9}),
        (
            "--env Recall-v0 --quick --policy mlp",
            "memory",
            QUICK | {"validate_every": AUTO_INTERVAL, "refresh_states": False},
        ),
        ("--env CartPole-v1 --batch_size 9", "small", {"batch_size": 9, "num_envs": 0}),
        ("--env CartPole-v1 --preset massive", "massive", {}),
        ("--env fake_batches:Walk --num_envs 1020", "small", {"num_envs": 1020}),
        (
            "--env fake_batches:Walk --num_envs 1024",
            "massive",
            {"num_envs": 1024, "batch_size": 256},
        ),
        (
            "--env CartPole-v1 --preset massive --num_envs 64",
            "massive",
            {"batch_size": 16, "num_envs": 64},
        ),
        (
            "--env CartPole-v1 --preset massive --num_steps 64 --grad_accumulation 2",
            "massive",
            {"num_steps": 64, "batch_size": 1024},
        ),
        ("--env CartPole-v1 --preset massive --batch_size 512", "massive", {"batch_size": 512}),
        (
            "--env CartPole-v1 --preset massive --quick",
            "massive",
            QUICK | {"batch_size": 8, "validate_every": 0},
        ),
        ("--env CartPole-v1 --encoder m:E", "small", {"normalize_obs": False}),
        ("--env CartPole-v1 --encoder m:E --normalize_obs", "small", {"normalize_obs": True}),
        ("--env agents_ranks:Screens-v0", "pixels", {}),
        ("--env agents_ranks:Cockpit-v0 --hidden_size 9", "pixels", {"hidden_size": 9}),
        ("--env agents_ranks:Screens-v0 --preset small", "small", {}),
        ("--env examples.many_spaces:PatchRecall-v0", "small", {}),
    ],
)
def test_the_task_selects_the_preset_and_flags_take_precedence(flags, kind, changes):
    config = fresh_config(parse_training(flags.split()), {})
    values = config.values
    expected = PRESETS[kind] | {"chosen_preset": kind} | changes
    if "env" in flags:
        expected.pop("num_worlds", None)  # num_worlds has no effect with --env
    assert {name: values[name] for name in expected} == expected
    shard_sizes(config.train, 0, 1)
