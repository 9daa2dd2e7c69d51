"""What a newcomer meets: an environment of their own, other programs' flags, odd sizes."""

import contextlib
import io
import json
import shutil
import subprocess
import sys

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from train_runs import REPO, evaluate_here, only_error, records, run_here, train_here

import train_distributed
from agents.config import OWNERS, RunConfig, TrainConfig
from agents.run.choice import OTHER_NAMES, fresh_config, parse_training
from agents.run.sizes import shard_sizes
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint

TINY = "--num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4 --hidden_size 8 --device cpu"
CUE = [*TINY.split(), "--env", "own_environment:Cue-v0", "--eval_episodes", "2"]


class Words(gymnasium.Env):
    """Says what no policy here reads, and counts how often it is made."""

    observation_space, action_space, made = spaces.Text(9), spaces.Discrete(2), 0

    def __init__(self):
        Words.made += 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--env Words-v0 --preset small", "observation space Text"),
        ("--env Words-v0", "observation space Text"),
        ("--policy own --core own_cores:Prophet", "looks ahead"),
        ("--policy own --core own_cores:Profet", "no function or class Profet: did you mean Pro"),
        ("--callback nowhere:call", "'nowhere:call': there is no module nowhere in /"),
        ("", "holds other files"),
    ],
)
def test_a_refused_run_announces_no_directory(flags, problem, tmp_path, monkeypatch, capsys):
    if not flags:
        (tmp_path / "run" / "config.json").mkdir(parents=True)
    monkeypatch.setitem(gymnasium.registry, "Words-v0", EnvSpec("Words-v0", Words))
    monkeypatch.setattr(Words, "made", 0)
    place = ["--env", "CartPole-v1", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *CUE, *place, *flags.split()) == 2
    out, err = capsys.readouterr()
    assert problem in only_error(err) and "run directory" not in out
    assert not flags or (not out and not (tmp_path / "run").exists())
    assert Words.made == ("Words" in flags)


def test_a_core_and_a_callback_lie_in_the_current_directory_as_an_environment_may(
    tmp_path, monkeypatch, capsys
):
    shutil.copy(REPO / "tests/own_cores.py", tmp_path / "cores_here.py")
    (tmp_path / "calls_here.py").write_text("def stop(moment):\n    return False\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    core = ["--env", "CartPole-v1", "--policy", "own", "--core", "cores_here:Decay"]
    for words in (["--callback", "calls_here:stop", "--run_dir", "run"], ["--resume", "run"]):
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
        new = [*CUE, *core, "--total_steps", 256] if "--callback" in words else []
        assert train_here(monkeypatch, *new, *words) == 0
        assert "a callback asked for it" in capsys.readouterr().out
    assert [line["iteration"] for line in records("run")] == [1, 2]


def test_what_other_programs_call_a_flag_leads_to_ours(monkeypatch, capsys):
    assert set(OTHER_NAMES.values()) <= OWNERS.keys() | {"run_dir"}
    assert not OTHER_NAMES.keys() & OWNERS.keys()
    names = {"--lr": "learning_rate", "--n-envs": "num_envs", "--clip_range=1": "clip_coef"}
    for word, flag in names.items():
        assert run_here(train_distributed.main, [word, "3"], monkeypatch) == 2
        assert f"(did you mean --{flag}?)" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--preset smal", "there is no preset 'smal': did you mean small?"),
        ("--preset none", "choose from trading, small, control, memory, paper"),
        ("--env ./lamp.py:Lamp-v0", "environment './lamp.py:Lamp-v0': its module raised"),
        ("--env /up/lamp.py:Lamp-v0", "there is no module /up/lamp in "),
        ("--resume {}/checkpoints", "whose newest checkpoint counts, got {0}/checkpoints: give "),
        ("--resume auto --run_dir {}/checkpoints", "is inside a run: give --run_dir {0}"),
        ("--resume {}/checkpoints/best.pt", "best.pt: give --resume {0}"),
        ("--resume {}/nothing.pt", "takes a run directory, whose newest "),
        ("--env CartPole-v1 --bptt_steps 48", "try --num_steps 144"),
        (
            "--env CartPole-v1 --batch_size 4096 --total_steps 100000",
            "262,144 steps, more than total_steps 100,000: give --batch_size 128 for minibatches",
        ),
    ],
)
def test_a_slip_of_the_first_day_is_answered_with_what_is_meant(
    flags, expected, finished, monkeypatch, capsys
):
    assert train_here(monkeypatch, *flags.format(finished[0]).split()) == 2
    assert expected.format(finished[0]) in only_error(capsys.readouterr().err)


def test_sizes_that_do_not_divide_propose_another_batch_for_the_same_environments():
    with pytest.raises(ValueError, match=r"try .*or --batch_size 10 or --batch_size 20$"):
        shard_sizes(TrainConfig(num_envs=10, batch_size=16, num_steps=64), 0, 1)


def test_an_iteration_beyond_the_whole_budget_is_a_warning(tmp_path, monkeypatch, capsys):
    flags = [*CUE, "--env", "CartPole-v1", "--total_steps", 1, "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 0
    warning = capsys.readouterr().err.splitlines()[0]
    assert "one iteration is 64 steps, more than --total_steps 1" in warning
    assert "--batch_size 4 counts sequences of 8 steps" in warning


# ---- presets


@pytest.mark.parametrize(
    ("flags", "kind", "expected"),
    [
        ("", "trading", (128, 0, 128, 1e-3, 0.5, 128)),
        ("--preset paper", "paper", (128, 0, 128, 3e-4, 0.95, 128)),
        ("--env CartPole-v1", "small", (8, 16, 64, 7e-4, 0.95, 64)),
        ("--env Pendulum-v1", "control", (8, 16, 64, 7e-4, 0.95, 64)),
        ("--env Recall-v0", "memory", (8, 32, 64, 7e-4, 0.9, 64)),
        ("--env Recall-v0 --no-memory", "memory", (8, 32, 64, 7e-4, 0.9, 64)),
        ("--env Recall-v0 --preset small", "small", (8, 16, 64, 7e-4, 0.95, 64)),
        (
            "--env CartPole-v1 --batch_size 64 --hidden_size 32",
            "small",
            (64, 0, 64, 7e-4, 0.95, 32),
        ),
        ("--env CartPole-v1 --bptt_steps 128", "small", (8, 0, 128, 7e-4, 0.95, 64)),
    ],
)
def test_a_preset_follows_from_the_task_and_flags_win(flags, kind, expected):
    parsed = parse_training(flags.split())
    config = fresh_config(parsed)
    train = config.train
    sizes = (train.batch_size, train.num_envs, train.num_steps)
    ppo = (config.ppo.learning_rate, config.ppo.gae_lambda)
    assert (train.chosen_preset, (*sizes, *ppo, config.policy.hidden_size)) == (kind, expected)
    shard_sizes(train, 0, 1)
    assert RunConfig.from_dict(config.to_dict()) == config
    has_states = kind == "memory" and not config.policy.stateless
    assert config.ppo.refresh_states == has_states


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (0, 5000)),
        ("--env CartPole-v1", (200_000, 5000)),
        ("--env Pendulum-v1 --total_steps 5000", (5000, 5000)),
        ("--env CartPole-v1 --num_episodes 10", (0, 10)),
        ("--env Recall-v0 --quick", (0, 96)),
    ],
)
def test_other_tasks_than_trading_have_a_budget_in_steps_unless_episodes_are_given(flags, expected):
    parsed = parse_training(flags.split())
    train = fresh_config(parsed).train
    assert (train.total_steps, train.num_episodes) == expected


# ---- what is evaluated, and what a run starts from


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of CartPole-v1 with a best checkpoint, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*CUE, "--env", "CartPole-v1", "--total_steps", 192, "--validate_every", 1]
    with pytest.MonkeyPatch.context() as monkeypatch:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert train_here(monkeypatch, *flags, "--run_dir", folder / "run") == 0
    return folder / "run", printed.getvalue()


def test_the_start_says_what_the_policy_sees_and_which_preset_is_in_use(finished):
    _, printed = finished
    assert "\nobservation: observation vector[4]\n" in printed
    assert "preset small: learning_rate 0.0007, update_epochs 10" in printed


def test_the_best_checkpoint_is_evaluated_unless_another_is_asked_for(
    finished, monkeypatch, capsys
):
    run_dir, _ = finished
    best = max(records(run_dir), key=lambda line: line["valid/return"])
    for flags, name in [((), "best.pt"), (("--which", "last"), "iteration_00000003.pt")]:
        assert evaluate_here(monkeypatch, run_dir, "--episodes", 2, *flags) == 0
        out = capsys.readouterr().out
        assert f"checkpoints/{name}, iteration {3 if flags else best['iteration']}" in out
        assert ("the best by valid/return" in out) == (not flags)


def test_the_end_evaluates_the_last_policy_and_the_best_one_on_any_number_of_ranks(
    finished, tmp_path, monkeypatch
):
    run_dir, printed = finished
    best = json.loads((run_dir / "summary.json").read_text())["best"]
    iteration = best.pop("iteration")
    assert "\nlast: 2 episodes" in printed
    assert f"\nbest.pt (iteration {iteration}): 2 episodes" in printed
    assert "CartPole-v1 is solved at a mean return of 475: not yet" in printed
    assert evaluate_here(monkeypatch, run_dir, "--json", tmp_path / "json") == 0
    assert json.loads((tmp_path / "json").read_text())["policy"] == best
    flags = [*CUE, "--env", "CartPole-v1", "--total_steps", 192, "--validate_every", 1]
    two = tmp_path / "two"
    assert train_here(monkeypatch, *flags, "--num_gpus", 2, "--run_dir", two) == 0
    assert json.loads((two / "summary.json").read_text())["best"] == best | {"iteration": iteration}


def test_a_damaged_best_checkpoint_costs_its_evaluation_and_nothing_else(
    finished, tmp_path, monkeypatch, capsys
):
    run_dir = shutil.copytree(finished[0], tmp_path / "run")
    best = run_dir / "checkpoints/best.pt"
    best.write_bytes(best.read_bytes()[:-100])
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    assert "best" not in json.loads((run_dir / "summary.json").read_text())
    assert str(best) in capsys.readouterr().err


def test_a_policy_is_evaluated_by_other_episodes_than_those_that_chose_it(
    finished, tmp_path, monkeypatch
):
    run_dir, _ = finished
    found = [json.loads((run_dir / "summary.json").read_text())["test"]]
    for seed in (1, 2):
        flags = ["--which", "last", "--seed", seed, "--json", tmp_path / "json"]
        assert evaluate_here(monkeypatch, run_dir, *flags) == 0
        found.append(json.loads((tmp_path / "json").read_text())["policy"])
    assert found[0] == found[1] != found[2]
    chosen_by = records(run_dir)[-1]
    assert any(chosen_by[f"valid/{name}"] != found[0][name] for name in ("return", "return_std"))


def test_a_run_starts_from_the_weights_and_statistics_of_another(
    finished, tmp_path, monkeypatch, capsys
):
    run_dir, _ = finished
    flags = [*CUE, "--env", "CartPole-v1", "--init_from", run_dir]
    frozen = ["--learning_rate", 0, "--total_steps", 64]
    assert train_here(monkeypatch, *flags, *frozen, "--run_dir", tmp_path / "next") == 0
    first = load_checkpoint(run_dir / "checkpoints/best.pt")
    then = load_checkpoint(latest_checkpoint(tmp_path / "next"))
    assert then["iteration"] == 1
    for name, weight in first["policy"].items():
        assert (then["policy"][name] == weight).all(), name
    counts = [state["obs_normalizer"]["moments.count"] for state in (first, then)]
    assert counts[1] == counts[0] + 64
    capsys.readouterr()
    other = [*flags, "--hidden_size", 16, "--run_dir", tmp_path / "other"]
    assert train_here(monkeypatch, *other) == 2
    error = only_error(capsys.readouterr().err)
    assert f"--init_from {run_dir}: the checkpoint is of another shape" in error


def test_packages_from_two_copies_are_refused_with_both_places(tmp_path):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents/__init__.py").write_text((REPO / "agents/__init__.py").read_text())
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPO)!r}]; import agents"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / "agents") in last and str(REPO / "rl_dist") in last
