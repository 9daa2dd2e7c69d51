"""Run the Python blocks and commands of the docs, with shorter training.

Blocks run by default, in this process. Commands run only with `-m slow`, as a reader would
start them, in a copy of the checkout that also contains the files that the pages mention.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from textwrap import indent

import pytest
import torch
from test_docs import MARK, PAGES, ROOT, TEXTS, TRAINING, commands, generated
from train_runs import daily_bars, python_path, run_here, train_here

from agents import export
from rl_dist.telemetry.metrics import close_logging

# This code runs before every block. It defines the names that the pages assume.
DEFINED = """
import gymnasium, numpy as np, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
loader = train_loader = valid_loader = test_loader = torch.utils.data.DataLoader(data, 8)
net, device = nn.Linear(4, 2), "cpu"
step = lambda batch: net(batch[0]).sum().backward()
env = gymnasium.Env()
env.observation_space = gymnasium.spaces.Box(0.0, 1.0, (16, 16, 3))
observation = reward = terminated = truncated = 0
"""
SHORTER = {
    "total_steps=20_000": "total_steps=1024, eval_episodes=2",
    "50_000": "1024",
    "on_iteration=watch": "eval_episodes=2, on_iteration=watch",
    "200_000": "1024",
    "n_envs=16": "n_envs=2",
}
NEEDS = {"policy.onnx": "onnxruntime", "sb3_contrib": "sb3_contrib", "agents.export": "onnx"}
NEEDS |= {"popgym:": "popgym", "--video": "pygame"}
CARTPOLE = "--env CartPole-v1 --total_steps 1024 --eval_episodes 2 --validate_every 0"


def need_packages(text):
    for part, package in NEEDS.items():
        if part in text:
            pytest.importorskip(package, reason=f"{package} is not installed")


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def all_blocks():
    for path in (ROOT / "README.md", *PAGES):
        for number, text in enumerate(blocks(path)):
            is_slow = "num_gpus=2" in text or path.stem == "migrating"
            marks = [pytest.mark.slow, pytest.mark.timeout(600)] if is_slow else []
            yield pytest.param(text, marks=marks, id=f"{path.stem}-{number}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with the runs, exported files and module that pages mention."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train_here(*CARTPOLE.split(), "--run_dir", "runs/my_run") == 0
        pendulum = CARTPOLE.replace("CartPole-v1", "Pendulum-v1").split()
        assert train_here(*pendulum, "--run_dir", "runs/pendulum") == 0
        if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
            assert run_here(export.main, "runs/pendulum", "--output", folder) == 0
    drift, *_, decay, bins = blocks(ROOT / "docs/own_environment.md")
    # the environment that the README uses
    made = 'gymnasium.register("MyEnv-v0", entry_point=Drift, max_episode_steps=100)\n'
    (folder / "my_module.py").write_text(drift + made + decay + bins)
    return folder


@pytest.mark.parametrize("text", list(all_blocks()))
def test_python_blocks_run(text, runs, monkeypatch):
    need_packages(text)
    for theirs, ours in SHORTER.items():
        text = text.replace(theirs, ours)
    text = MARK.sub(lambda mark: generated().generate(mark[1]), text)
    if text.startswith("return "):
        text = f"def function():\n{indent(text, '    ')}\nfunction()"
    monkeypatch.chdir(runs)
    monkeypatch.syspath_prepend(runs)
    path = runs / "block.py"
    path.write_text(DEFINED + text)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        close_logging()
        torch.set_num_threads(1)


# Replacements for words in commands, and flags that shorten training.
SMALL = {"RUN_DIR": "runs/trading", "DIR": "out", "runs/pretrain/DATE_TIME": "runs/pretrained"}
LENGTHS = {"--total_steps": "1024", "--num_episodes": "1", "--epochs": "1"}
OF_ENV = "--total_steps 1024 --eval_episodes 2"
OF_BARS = "--num_episodes 1 --threads 1 --hidden_size 16"
OF_MARKETS = f"{OF_BARS} --num_worlds 2 --test_start 2019-06-03 --test_end 2019-08-30"
OF_PRETRAINING = "--epochs 1 --num_worlds 2 --hidden_size 16"
ELSEWHERE = {  # first words of a command -> reason why this test does not run it
    "make test": "runs this test itself",
    "make train$": "the main job takes five minutes; other tests train it briefly",
    "make docs": "continuous integration runs it",
    "torchrun --nnodes 2": "needs two machines; tests/hosts tests it",
    "python examples/ray_train.py": "needs Ray; tests/hosts/test_ray_train.py tests it",
    "python benchmarks/task_table.py": "takes hours; see tests/test_task_table.py",
}
REFUSED = {"--interactive": "terminal"}  # flag -> a word in the expected error
if not torch.cuda.is_available():
    REFUSED["--gpu_ids"] = "CUDA"


def small(words):
    """Return the command with flags for a short run; its own flags take precedence."""
    words = [SMALL.get(word, word) for word in words]
    for flag in LENGTHS.keys() & set(words):
        words[words.index(flag) + 1] = LENGTHS[flag]
    program, more = TRAINING, ""
    if "agents.pretrain" in words:
        program, more = "agents.pretrain", OF_PRETRAINING
    elif TRAINING in words and not {"--quick", "--resume"} & set(words):
        more = OF_ENV if "--env" in words else OF_BARS if "--data" in words else OF_MARKETS
        if not {"--env", "--batch_size"} & set(words):
            more += " --num_envs 8 --num_steps 64 --batch_size 8"
    place = words.index(program) + 1 if more else 0
    return words[:place] + more.split() + words[place:]


def run(words, folder):
    """Run a command in a folder, as a shell would."""
    first, *rest = words
    starts = {"python": [sys.executable], "make": ["make", f"VENV={sys.prefix}"]}
    starts["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    options = {"capture_output": True, "text": True, "cwd": folder, "timeout": 600}
    options["env"] = os.environ | {"PYTHONPATH": python_path(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*starts[first], *rest], stdin=subprocess.DEVNULL, **options)


@pytest.fixture(scope="module")
def checkout(runs, tmp_path_factory):
    """Return a copy of the checkout with the files that the pages mention."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns(".git", ".venv", "*cache*", "runs", "site", "shared")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(runs, folder, dirs_exist_ok=True)
    bars = daily_bars(num_days=3400, start="2008-01-01")
    for name in ("prices.csv", "prices.csv.gz"):
        bars.to_csv(folder / name, index=False)
    for line in (
        "python train_distributed.py --run_dir runs/trading",
        "python -m agents.pretrain --run_dir runs/pretrained",
    ):
        done = run(small(line.split()), folder)
        assert done.returncode == 0, done.stderr
    return folder


LINES = dict.fromkeys(tuple(words) for path in TEXTS for words in commands(path))
OURS = [w for w in LINES if not any(re.match(begin, " ".join(w)) for begin in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", OURS, ids=lambda words: " ".join(words)[:70])
def test_commands_run(words, checkout):
    text = " ".join(words)
    need_packages(text)
    done = run(small(list(words)), checkout)
    if refused := [named for part, named in REFUSED.items() if part in text]:
        assert done.returncode == 2 and refused[0] in done.stderr.splitlines()[-1], done.stderr
    else:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
