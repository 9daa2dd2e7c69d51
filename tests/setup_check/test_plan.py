"""Plans for GPUs that are not here."""

import json
import sys

import pytest
from train_runs import only_error, run_here

import check_gpu_setup

SMALL = "--env CartPole-v1 --num_envs 64 --batch_size 64 --num_steps 32 --bptt_steps 8 --json"


def planned(flags, monkeypatch, capsys):
    code = run_here(check_gpu_setup.main, [*SMALL.split(), *flags.split()], monkeypatch)
    return code, capsys.readouterr()


def test_64_ranks_share_environments_sequences_and_shards(monkeypatch, capsys):
    whole = {}
    for strategy in ("ddp", "hybrid --shard_size 4"):
        flags = f"--plan 80 --num_gpus 64 --hidden_size 7 --strategy {strategy}"
        code, said = planned(flags, monkeypatch, capsys)
        plan = json.loads(said.out)
        ranks = plan["ranks"]
        assert code == 0 and len(ranks) == 64 and plan["device_type"] == "cuda"
        assert sum(rank["environments"] for rank in ranks) == 64
        assert sum(rank["sequences"] for rank in ranks) == 64
        whole[strategy] = ranks[0]["parameters"]
        # kept three times: a parameter and Adam's two moments, once in each group of ranks
        group = 1 if strategy == "ddp" else 4
        assert sum(rank["sharded"] for rank in ranks[:group]) == 3 * whole[strategy]
    assert len(set(whole.values())) == 1
    assert len({rank["sharded"] for rank in ranks[:4]}) > 1  # 7 units do not divide by 4
    # the same as a table: ranks that are alike in one row
    monkeypatch.setattr(sys.modules[__name__], "SMALL", SMALL.removesuffix(" --json"))
    code, said = planned(flags, monkeypatch, capsys)
    head, _, titles, *rows, total, verdict = said.out.splitlines()
    assert code == 0 and head == f"64 ranks on cuda, strategy {plan['strategy']}"
    assert titles.split() == ["ranks", *ranks[0]]
    assert len(rows) == len({tuple(rank.values()) for rank in ranks})
    assert sum(int(row.split()[0]) for row in rows) == 64
    assert total.split() == ["all", "64", "64"]
    assert verdict.endswith("of 80 GiB on the fullest: fits")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--plan 1 --num_gpus 2", 1, ""),  # CUDA itself takes that
        ("--plan 80", 2, "num_gpus"),
        ("--plan 80 --num_gpus 48", 2, "--num_envs"),
        ("--plan 80 --num_gpus 2 --strategy dp", 2, "one rank per GPU"),
        ("--plan 80 --num_gpus 4 --strategy hybrid --shard_size 3", 2, "shard_size 3"),
        ("--plan 80 --num_gpus 2 --precision fp16 --strategy hybrid", 2, "bf16"),
    ],
)
def test_what_does_not_fit_or_go_together_is_an_exit_code(flags, code, words, monkeypatch, capsys):
    found, said = planned(f"{flags} --hidden_size 8", monkeypatch, capsys)
    assert found == code
    assert words in only_error(said.err) if words else not said.err
