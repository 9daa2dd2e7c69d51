"""The main command for real: files of a run, refusals, stop and resume."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from statistics import harmonic_mean

import gymnasium
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_runs import (
    PATIENCE_S,
    SIZES,
    SMALL,
    assert_nobody_left,
    only_error,
    output_in,
    records,
    start,
    start_training,
    train_here,
    wait_until,
)

from agents.config import DEFAULTS, SECTIONS, RunConfig
from agents.run.choice import choose_run, parse_training
from agents.run.metric_table import CHOICES, METRICS, MONITORED, OTHER_TASKS, TRADING
from agents.trainer import Training
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.resume_check import differences, result_of

OFTEN = ["--validate_every", "3", "--checkpoint_every", "1", "--keep_checkpoints", "100"]
FOREVER = "--num_episodes 1000000 --checkpoint_every 1000 --validate_every 0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train the same on one rank and on two.

    {ranks: (run directory, exit code, stdout, stderr)}.
    """
    folder = tmp_path_factory.mktemp("finished")
    flags = [*SMALL, *OFTEN, "--precision", "fp64", "--device", "cpu"]
    ended = {}
    for ranks in (1, 2):
        run_dir = folder / str(ranks)
        with pytest.MonkeyPatch.context() as patch, output_in(folder):
            code = train_here(patch, *flags, "--num_gpus", ranks, "--run_dir", run_dir)
        ended[ranks] = run_dir, code, *((folder / name).read_text() for name in ("out", "err"))
    return ended


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_leaves_all_that_is_promised(finished, ranks):
    run_dir, code, out, err = finished[ranks]
    assert code == 0, err
    # a busy machine makes stragglers
    said = "\n".join(line for line in err.splitlines() if "straggler" not in line).lower()
    assert "error" not in said and "warning" not in said and "traceback" not in said, err
    assert out.count("data: ") == 1 and "SIMULATED" in out and str(run_dir) in out
    (events,) = (name for name in names(run_dir) if name.startswith("events.out.tfevents"))
    expected = {"checkpoints", "config.json", "evaluation", "logs", "metrics.jsonl", "plots"}
    assert set(names(run_dir)) == expected | {"state.json", "summary.json", events}
    assert names(run_dir / "plots") == ["equity.png", "learning_curve.png"]
    saved = [f"iteration_{line['iteration']:08d}.pt" for line in records(run_dir)]
    assert names(run_dir / "checkpoints") == ["best.pt", *saved]
    assert set(json.loads((run_dir / "config.json").read_text())) == set(SECTIONS)
    assert names(run_dir / "logs") == [f"rank_{rank}.log" for rank in range(ranks)]
    for rank in range(ranks):
        assert f"INFO rank {rank}" in (run_dir / "logs" / f"rank_{rank}.log").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_written_once_per_iteration_with_every_rank_in_them(finished, ranks):
    run_dir = finished[ranks][0]
    lines = records(run_dir)
    numbers = list(range(1, len(lines) + 1))
    assert [line["iteration"] for line in lines] == numbers and len(lines) > 3
    assert [line["global_step"] for line in lines] == [128 * number for number in numbers]
    for line in lines:
        assert [entry["rank"] for entry in line["ranks"]] == list(range(ranks))
        assert sum(entry["episode/count"] for entry in line["ranks"]) == line["episode/count"]
        assert ("valid/sharpe" in line) == (line["iteration"] % 3 == 0 or line is lines[-1])
    # it stopped at the first iteration end that reached the budget
    total = lines[-1]["episode/total"]
    assert lines[-2]["episode/total"] < 8 <= total == sum(line["episode/count"] for line in lines)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["iteration"], summary["episodes"]) == (len(lines), total)
    board = EventAccumulator(str(run_dir)).Reload()
    losses = {event.step: event.value for event in board.Scalars("loss/policy")}
    written = {line["global_step"]: line["loss/policy"] for line in lines}
    assert losses == pytest.approx(written, rel=1e-6)
    assert f"rank_{ranks - 1}/episode/count" in board.Tags()["scalars"]


def test_a_run_writes_exactly_the_metrics_of_the_table(finished, tmp_path, monkeypatch):
    flags = ["--env", "CartPole-v1", "--total_steps", "256", "--eval_episodes", "2", *SIZES[2:]]
    assert train_here(monkeypatch, *flags, "--run_dir", tmp_path / "run") == 0
    own = {tmp_path / "run": (OTHER_TASKS, CHOICES), finished[1][0]: (TRADING,)}
    for run_dir, task in own.items():
        last = records(run_dir)[-1]
        kept = ("", *task, MONITORED)
        written = {name: metric for name, metric in METRICS.items() if metric.when in kept}
        assert set(last) == {name for name, metric in written.items() if metric.overall}
        assert set(last["ranks"][0]) == {name for name in written if written[name].per_rank}


def assert_close(found, expected):
    """Compare nested figures: numbers to rounding, everything else exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        is_number = isinstance(expected, float)
        assert found == (pytest.approx(expected, rel=1e-6, abs=1e-6) if is_number else expected)


def test_two_ranks_train_and_evaluate_as_one(finished):
    one, two = finished[1][0], finished[2][0]
    left, right = (load_checkpoint(latest_checkpoint(run_dir))["policy"] for run_dir in (one, two))
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=0, atol=1e-9), name
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (one, two)]
    for summary in summaries:
        assert len(summary.pop("parameter_sha256")) == 64  # sums are rounded in another order
        summary.pop("scaling", None)
    assert_close(summaries[1], summaries[0])
    keys = ("episode/return", "episode/count", "loss/policy", "optim/grad_norm")
    figures = [[line[key] for line in records(run_dir) for key in keys] for run_dir in (one, two)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)


def test_several_ranks_end_with_predicted_against_measured(finished):
    assert "scaling: " not in finished[1][2] and finished[2][2].count("scaling: 2 ranks") == 1
    found = json.loads((finished[2][0] / "summary.json").read_text())["scaling"]
    assert found["ranks"] == 2 and found["predicted_steps_per_s"] > 0 and 0 < found["busy"] <= 1
    paces = [line["time/sps"] for line in records(finished[2][0])[2:]]
    assert found["measured_steps_per_s"] == harmonic_mean(paces)


# ---- resume


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    finished, tmp_path, monkeypatch, capsys
):
    whole, again = finished[1][0], tmp_path / "again"
    shutil.copytree(whole, again)
    for path in (again / "checkpoints").iterdir():
        if path.name > "iteration_00000003.pt":
            path.unlink()
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99, "torn')
    assert train_here(monkeypatch, "--resume", again) == 0, capsys.readouterr().err
    left, right = (load_checkpoint(latest_checkpoint(run_dir)) for run_dir in (whole, again))
    assert json.loads(left.pop("config"))["train"] == json.loads(right.pop("config"))["train"]
    assert differences(result_of(whole), result_of(again)) == []
    assert (whole / "summary.json").read_text() == (again / "summary.json").read_text()


@pytest.mark.parametrize(
    ("signum", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)]
)
@pytest.mark.slow
def test_a_stop_signal_saves_and_resume_goes_on_without_repeated_or_missing_iterations(
    signum, send, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    flags = [*SMALL, *FOREVER.split(), "--num_gpus", 2, "--device", "cpu"]
    job = start_training(*flags, "--run_dir", run_dir)
    path = run_dir / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 2, job)
    send(job.pid, signum)
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 128 + signum, err
    assert "Traceback" not in err and "error" not in err, err
    assert f"--resume {run_dir}" in out
    assert_nobody_left(job.pid)
    saved = load_checkpoint(latest_checkpoint(run_dir))
    assert records(run_dir)[-1]["iteration"] == saved["iteration"] >= 2
    budget = saved["episodes"] + 4
    flags = ["--resume", run_dir, "--num_gpus", 1, "--num_episodes", budget]
    assert train_here(monkeypatch, *flags) == 0, capsys.readouterr().err
    lines = records(run_dir)
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["iteration"] > saved["iteration"] and lines[-1]["episode/total"] >= budget
    assert len(lines[saved["iteration"] - 1]["ranks"]) == 2 and len(lines[-1]["ranks"]) == 1


@pytest.mark.parametrize(("signum", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_the_first_stop_signal_is_answered_before_the_iteration_ends(
    signum, ends, tmp_path, monkeypatch, capfd
):
    update, answers = Training.update, []

    def interrupted(training, rollout):
        signal.raise_signal(signum)
        answers.append(capfd.readouterr().err)
        return update(training, rollout)

    monkeypatch.setattr(Training, "update", interrupted)
    flags = [*SIZES, "--env", "CartPole-v1", "--num_episodes", 99, "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 128 + signum
    (answer,) = answers
    assert f"{signum.name}: saving after this iteration" in answer
    assert ("(press again to end without saving)" in answer) == ends
    assert latest_checkpoint(tmp_path / "run").name == "iteration_00000001.pt"


def test_resume_auto_begins_a_run_and_then_goes_on_with_it(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    # killed before its first checkpoint
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    flags = [*SIZES, "--env", "CartPole-v1", "--eval_episodes", "2", "--checkpoint_every", "1"]
    flags += ["--run_dir", run_dir, "--resume", "auto"]
    assert train_here(monkeypatch, *flags, "--num_episodes", "2") == 0, capsys.readouterr().err
    first = records(run_dir)
    assert [line["iteration"] for line in first] == list(range(1, len(first) + 1))
    budget = first[-1]["episode/total"] + 1
    assert train_here(monkeypatch, *flags, "--num_episodes", budget) == 0, capsys.readouterr().err
    assert records(run_dir)[: len(first)] == first and len(records(run_dir)) > len(first)
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert (
        records(run_dir)[-1]["iteration"]
        == json.loads((run_dir / "summary.json").read_text())["iteration"]
    )


@pytest.mark.slow
def test_the_ranks_of_torchrun_share_one_run_directory(tmp_path):
    script = Path(__file__).parents[2] / "train_distributed.py"
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    job = start(*torchrun, script, *SMALL, "--device=cpu", cwd=tmp_path)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert out.count("data: ") == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [one["rank"] for one in records(run_dir)[-1]["ranks"]] == [0, 1]
    assert len(names(run_dir / "logs")) == 4


# ---- bad input


CARTPOLE = "--env CartPole-v1"
REFUSED = [  # flags, and the field, value and fix that the line must name
    ("--num_epsodes 8", ["--num_epsodes", "--num_episodes"]),
    ("--num_envs -4", ["num_envs", "'-4'", "0"]),
    ("--num_steps 33", ["num_steps 33", "bptt_steps"]),
    (f"{CARTPOLE} --bptt_steps 48 --num_steps 64", ["--num_steps 48"]),
    ("--num_gpus 3 --device cpu", ["batch_size", "3 ranks", "--batch_size"]),
    (f"{CARTPOLE} --batch_size 4096 --total_steps 100000", ["--batch_size 128", "--num_envs"]),
    ("--env Nope-v9", ["Nope-v9"]),
    ("--env ./lamp.py:Lamp-v0", ["./lamp.py:Lamp-v0"]),
    ("--env Words-v0", ["observation space Text"]),
    (f'{CARTPOLE} --env_kwargs {{"colour":1}}', ["colour"]),
    (f"{CARTPOLE} --policy own --core own_cores:Prophet", ["looks ahead"]),
    (f"{CARTPOLE} --policy own --core own_cores:Profet", ["Profet", "Prophet"]),
    (f"{CARTPOLE} --callback nowhere:call", ["nowhere:call"]),
    (f"{CARTPOLE} --stop_at valid/retrun 3", ["stop_at", "valid/retrun", "valid/return"]),
    ("--data no_such.csv", ["no_such.csv"]),
    ("--episode_days 5000", ["episode_days"]),
    (f"{CARTPOLE} --preset paper", ["--preset paper", "CartPole-v1"]),
    ("--preset smal", ["--preset", "smal", "small"]),
    ("--init_from no_such_run", ["no_such_run"]),
    (f"{CARTPOLE} --init_from a --pretrained b", ["init_from", "pretrained"]),
    ("--resume no_such_run", ["no_such_run"]),
    (f"{CARTPOLE} --num_envs 10000000", ["GiB", "--num_envs"]),
]


class Words(gymnasium.Env):
    observation_space, action_space = spaces.Text(9), spaces.Discrete(2)


@pytest.mark.parametrize(("flags", "named"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_bad_input_is_one_line_and_leaves_nothing(flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gymnasium.registry, "Words-v0", EnvSpec("Words-v0", Words))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(flags)
    assert train_here(monkeypatch, *SIZES[:2], *SIZES[-2:], *words) == 2
    line = only_error(capsys.readouterr().err)
    assert [part for part in named if part not in line] == [], line
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--env CartPole-v1 --fee_bps 3 --market_seed 2 --seed 5", {"fee_bps", "market_seed"}),
        ("--data x.csv --market_edge 3 --fee_bps 3", {"market_edge"}),
        ("--eval_episodes 3 --env_timeout 3 --num_worlds 2", {"eval_episodes", "env_timeout"}),
        ("--total_steps 1000 --num_episodes 3", {"num_episodes"}),
        ("--lr_scaling sqrt", {"lr_scaling"}),
        ("--lr_scaling sqrt --scaling weak", set()),
        ("--separate_trunks --policy clstm", {"separate_trunks"}),
        ("--env Recall-v0 --policy mlp --refresh_states", {"refresh_states"}),
        ("--hybrid_form pipeline --shard_size 2", {"hybrid_form", "shard_size"}),
        ("--strategy hybrid --shard_size 2", set()),
        ("--strategy hybrid --hybrid_form pipeline --shard_size 2", {"shard_size"}),
    ],
)
def test_flags_without_effect_are_named_and_stay_at_their_default(flags, idle, capsys):
    parsed = parse_training(flags.split())
    with contextlib.ExitStack() as held:
        values = choose_run(parsed, held).config.values
    printed = re.findall(r"--(\w+)", capsys.readouterr().out)
    assert set(printed) == idle
    assert {name: values[name] for name in idle} == {name: DEFAULTS[name] for name in idle}
    kept = parsed.given.keys() - idle
    given = RunConfig(**parsed.configs).values
    assert {name: values[name] for name in kept} == {name: given[name] for name in kept}


def test_the_users_own_files_in_a_run_directory_are_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs").mkdir()
    mine = tmp_path / "logs/mine.txt"
    mine.write_text("mine")
    for where, env in (
        (tmp_path / "logs/mine.txt/below", "CartPole-v1"),
        (tmp_path / "logs", "CartPole-v1"),
        (tmp_path, "faulty_envs:Missing-v0"),
    ):
        assert train_here(monkeypatch, *SIZES, "--env", env, "--run_dir", where) == 2
        only_error(capsys.readouterr().err)
        assert mine.read_text() == "mine" and names(tmp_path) == ["logs"]


def test_a_fault_of_an_environment_is_named_and_leaves_its_traceback_in_a_free_directory(
    tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    log = run_dir / "logs/rank_0.log"

    def code_of(env):
        flags = [*SIZES, "--eval_episodes", "2", "--run_dir", run_dir]
        return train_here(monkeypatch, *flags, "--env", f"faulty_envs:{env}")

    assert code_of("NanAtFive-v0") == 1
    line = only_error(capsys.readouterr().err)
    assert all(part in line for part in ("NanAtFive-v0", "number 0", "step 5", "nan"))
    assert names(run_dir) == ["logs"]
    assert code_of("Raises-v0") == 1
    line = only_error(capsys.readouterr().err)
    assert "RuntimeError: fell over (faulty_envs.py:" in line and str(log) in line
    assert "in _stumble" in log.read_text()
    assert code_of("Walk-v0") == 0
    assert json.loads((run_dir / "summary.json").read_text())["test"]["return"] == 9.0


def test_a_fresh_start_or_a_bad_resume_does_not_touch_another_run(finished, monkeypatch, capsys):
    run_dir = finished[1][0]
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for flags, named in [
        (["--run_dir", run_dir], f"--resume {run_dir}"),
        (["--resume", run_dir, "--hidden_size", "16"], "--hidden_size 16 (it has 8)"),
        (["--resume", latest_checkpoint(run_dir)], str(latest_checkpoint(run_dir))),
        (["--resume", run_dir / "checkpoints"], f"{run_dir}/checkpoints"),
        (["--resume", run_dir.parent], f"name one: {run_dir}"),
    ]:
        assert train_here(monkeypatch, *flags) == 2
        assert named in only_error(capsys.readouterr().err)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
