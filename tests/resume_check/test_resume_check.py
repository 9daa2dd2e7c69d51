"""The command that proves exact resumes, here with a user-defined environment."""

import json
import shutil

import pytest
from tensorboard_readers import scalars
from train_runs import (
    REPO,
    iterations,
    output_in,
    printed_error,
    python_path,
    records,
    start,
)

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint
from rl_dist.resume_check import check, compare, differences, main, parse
from rl_dist.run_dir import RunDir

pytestmark = pytest.mark.timeout(600)  # starts 3 training runs, perhaps on a busy machine
SMALL = ["--device=cpu", "--hidden_size=8", "--num_steps=16"]


def begin(folder, *flags):
    """Start the command with `folder` as the place for its temporary files."""
    command = ["-m", "rl_dist.resume_check", *SMALL, *flags]
    return start(*command, cwd=REPO, env={"TMPDIR": str(folder)})


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """Compare an uninterrupted run of 6 iterations with one that was killed after 3.

    Return both run directories.
    """
    folder = tmp_path_factory.mktemp("proof")
    args = parse([*SMALL, "--env=misbehaving_envs:SavedWithLimit-v0", "--iterations=3"])
    with pytest.MonkeyPatch.context() as patch, output_in(folder):
        patch.setenv("PYTHONPATH", python_path(REPO / "tests"))
        is_equal = check(args, folder)
    out = (folder / "out").read_text()
    assert is_equal and "bit-identical: all " in out, out + (folder / "err").read_text()
    return folder / "straight", folder / "killed"


def test_the_parameters_of_a_killed_and_resumed_run_have_the_same_hash(proof):
    assert len({RunDir(run_dir).summary()["parameter_sha256"] for run_dir in proof}) == 1


def test_a_checkpoint_holds_the_states_of_the_environments(proof):
    environments = load_checkpoint(latest_checkpoint(proof[1]))["environments"]
    assert {"walk", "age", "generator"} <= set(environments)


def test_every_iteration_has_one_record_although_a_run_was_killed(proof):
    for run_dir in proof:
        assert iterations(run_dir) == [1, 2, 3, 4, 5, 6]


def test_tensorboard_shows_a_killed_and_resumed_run_as_one(proof):
    straight, killed = proof
    assert len(list(killed.glob("events.*"))) == 2
    for tag in ("loss/policy", "episode/count", "optim/learning_rate", "rank_0/episode/count"):
        assert scalars(killed)[tag] == scalars(straight)[tag]
    assert [step for step, _ in scalars(killed)["loss/policy"]] == [128 * i for i in range(1, 7)]


def test_the_metric_that_differs_is_named(proof, tmp_path, capsys):
    straight, killed = proof
    run_dir = shutil.copytree(killed, tmp_path / "killed")
    lines = records(killed)
    lines[4]["loss/value"] += 1.0
    lines[5]["time/sps"] += 1.0  # a measured time, which may differ
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not compare(straight, run_dir, 0.0)
    assert "different: metrics, iteration 5/loss/value: " in capsys.readouterr().out


def test_the_tensor_that_differs_is_named(proof, tmp_path, capsys):
    straight, killed = proof
    run_dir = shutil.copytree(killed, tmp_path / "killed")
    state = load_checkpoint(latest_checkpoint(killed))
    state["policy"]["critic_head.weight"][0, 3] += 1e-6
    save_checkpoint(run_dir / "checkpoints", state, iteration=6, keep=3)
    assert not compare(straight, run_dir, 0.0) and compare(straight, run_dir, 1e-4)
    assert "different: policy/critic_head.weight: " in capsys.readouterr().out


def test_an_entry_that_only_one_run_has_is_named():
    assert differences({"a": 1}, {"a": 1, "b": [2]}) == ["b/0 exists in only one run"]


def test_the_budget_is_derived_from_the_sizes_and_a_bad_one_is_a_one_line_error(capsys):
    assert main(["--iterations=0"]) == 2 and "at least 1" in printed_error(capsys)
    flags = parse(["--num_steps=64", "--batch_size=4", "--iterations=3"]).flags
    assert flags.index("--batch_size=8") < flags.index("--batch_size=4")  # the last value is used
    assert {"--num_envs=8", "--checkpoint_every=3", f"--total_steps={2 * 3 * 8 * 64}"} <= {*flags}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, expected",
    [
        ("Recall-v0 --policy mlp --target_kl 0.001 --learning_rate 0.01", "bit-identical: all "),
        ("StockTrading-v0 --num_worlds 2 --num_gpus 2", "bit-identical: all "),
        ("Recall-v0 --num_gpus 3 --num_envs 6 --batch_size 6", "bit-identical: all "),
        ("Recall-v0 --num_gpus 4 --strategy hybrid --shard_size 2", "bit-identical: all "),
        ("Recall-v0 --num_gpus 4 --strategy hybrid --hybrid_form pipeline", "bit-identical: all "),
        # The run resumes on one rank, which does not use --strategy ddp.
        ("Recall-v0 --num_gpus 2 --resume_on 1 --precision fp64 --strategy ddp", "within 0.0001"),
    ],
)
def test_lstm_and_mlp_resume_exactly_on_one_rank_and_several(flags, expected, tmp_path):
    job = begin(tmp_path, "--env", *flags.split(), "--iterations=2")
    try:
        out, err = job.communicate(timeout=500)
    finally:
        job.terminate()  # SIGTERM also ends the training runs that the command started
    assert job.returncode == 0 and expected in out, out + err
    assert not list(tmp_path.iterdir())
