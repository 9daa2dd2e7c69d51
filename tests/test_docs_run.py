"""The pages' Python blocks and commands run, with small stand-ins for what takes long.

Blocks run by default, each in this process; commands with `-m slow`, each as a reader starts it, in
a copy of the checkout in which the files lie that the pages speak of.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from textwrap import indent

import numpy as np
import pytest
import torch
from test_docs import MARK, PAGES, ROOT, TEXTS, TRAINING, commands, generated
from train_runs import daily_bars, run_here, train_here

from agents.export import command as export
from rl_dist.telemetry.metrics import close_logging

ONNX = ("onnx", "onnxscript", "onnxruntime")
DEFINED = """
import torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
loader = train_loader = valid_loader = test_loader = torch.utils.data.DataLoader(data, 8)
net, device = nn.Linear(4, 2), "cpu"
step = lambda batch: net(batch[0]).sum().backward()
"""
FLOATS = """
import gymnasium
import numpy as np
env = gymnasium.Env()
env.observation_space = gymnasium.spaces.Box(0.0, 1.0, (16, 16, 3))
"""
CARTPOLE = "--env CartPole-v1 --total_steps 1024 --eval_episodes 2 --validate_every 0"
# page and number of the block: what is defined before it, what stands for what, packages it needs
BLOCKS = {
    ("python", 2): ("", {"20_000": "1024, eval_episodes=2"}, ()),
    ("python", 3): ("", {"50_000": "1024", "on_iteration": "eval_episodes=2, on_iteration"}, ()),
    ("planning", 0): (DEFINED, {}, ()),
    ("pretraining", 0): (DEFINED, {}, ()),
    ("deployment", 0): ("", {}, ONNX),
    ("migrating", 0): ("", {"200_000": "1024", "n_envs=16": "n_envs=2"}, ("sb3_contrib",)),
    ("own_environment", 1): (FLOATS, {}, ()),
    ("own_environment", 2): ("observation, reward, terminated, truncated = 0, 0, 0, 0\n", {}, ()),
}


def blocks():
    """Page, number and text of every Python block."""
    for path in (ROOT / "README.md", *PAGES):
        texts = re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
        for number, text in enumerate(texts):
            is_slow = "num_gpus=2" in text or path.stem == "migrating"
            marks = [pytest.mark.slow, pytest.mark.timeout(600)] if is_slow else []
            yield pytest.param(path.stem, number, text, marks=marks, id=f"{path.stem}-{number}")


def page_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{name}.md").read_text(), re.S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run, the exported files and the module of the pages."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train_here(patch, *CARTPOLE.split(), "--run_dir", "runs/my_run") == 0
        pendulum = CARTPOLE.replace("CartPole-v1", "Pendulum-v1").split()
        assert train_here(patch, *pendulum, "--run_dir", "runs/pendulum") == 0
        if all(map(find_spec, ONNX)):
            assert run_here(export.main, ["runs/pendulum", "--output", folder], patch) == 0
    drift, *_, decay = page_blocks("own_environment")
    made = 'gymnasium.register("MyEnv-v0", entry_point=Drift, max_episode_steps=100)\n'  # README's
    (folder / "my_module.py").write_text(drift + made + decay)
    return folder


@pytest.mark.parametrize("page, number, text", list(blocks()))
def test_python_blocks_run(page, number, text, runs, monkeypatch):
    before, replaced, needs = BLOCKS.get((page, number), ("", {}, ()))
    for name in needs:
        pytest.importorskip(name, reason=f"{name} is not installed")
    for theirs, ours in replaced.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    text = MARK.sub(lambda mark: generated().generate(mark[1]), text)
    if re.search(r"^return ", text, re.M):
        text = f"def function():\n{indent(text, '    ')}\nfunction()"
    monkeypatch.chdir(runs)
    monkeypatch.syspath_prepend(runs)
    path = runs / "block.py"
    path.write_text(before + text)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        close_logging()
        torch.set_num_threads(1)


LENGTHS = {"--total_steps": "1024", "--num_episodes": "1", "--epochs": "1"}
# what is added unless the command says it
QUICK = {"--threads": "1", "--hidden_size": "16"}
SIZES = {"--num_envs": "8", "--num_steps": "64", "--batch_size": "8"}
MARKETS = {"--num_worlds": "2", "--test_start": "2019-06-03", "--test_end": "2019-08-30"}
NAMES = {"RUN_DIR": "runs/trading", "DIR": "out", "runs/pretrain/DATE_TIME": "runs/pretrained"}
ELSEWHERE = {  # how a command begins: why no test here runs it
    "make test": "it runs this",
    "make train$": "the main job, five minutes; tests train it shorter",
    "make docs": "continuous integration does",
    "torchrun --nnodes 2": "two machines; tests/hosts",
    "python examples/ray_train.py": "a Ray cluster; tests/hosts/test_ray_train.py",
    "python benchmarks/memory_table.py": "half an hour; tests/test_memory_table.py runs a row",
}
REFUSED = {"--interactive": "terminal"}  # what the line of a refusal names
if not torch.cuda.is_available():
    REFUSED["--gpu_ids"] = "CUDA"
NEEDS = {"popgym:": "popgym", "--video": "pygame", "agents.export": "onnx"}


@pytest.fixture(scope="module")
def checkout(runs, tmp_path_factory):
    """A copy of the checkout, with the files that the pages speak of."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("agents", "envs", "rl_dist", "examples", "benchmarks", "tests", "docs", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(path, folder)
    shutil.copytree(runs, folder, dirs_exist_ok=True)
    bars = daily_bars(num_days=3400)
    days = np.busday_offset("2008-01-01", np.arange(3400), roll="forward")
    bars["date"] = np.repeat(days.astype(str), 5)
    for name in ("prices.csv", "prices.csv.gz"):
        bars.to_csv(folder / name, index=False)
    for line in (
        "python train_distributed.py --run_dir runs/trading",
        "python -m agents.pretrain --run_dir runs/pretrained",
    ):
        done = run(small(line.split()), folder)
        assert done.returncode == 0, done.stderr
    return folder


def small(words):
    """The command with a short training in place of its long one."""
    words = [NAMES.get(word, word) for word in words]
    if "agents.pretrain" in words:
        more = {"--epochs": "1", "--num_worlds": "2", "--hidden_size": "16"}
    elif TRAINING not in words or {"--quick", "--resume"} & set(words):
        more = {}
    elif "--env" in words:
        more = {"--total_steps": "1024", "--eval_episodes": "2"}
    else:
        more = {"--num_episodes": "1"} | QUICK | ({} if "--batch_size" in words else SIZES)
        more |= {} if "--data" in words else MARKETS
    for flag in LENGTHS.keys() & set(words):
        words[words.index(flag) + 1] = LENGTHS[flag]
    return words + [each for flag in more if flag not in words for each in (flag, more[flag])]


def run(words, folder):
    """Start it as in a shell in that folder."""
    first, *rest = words
    starts = {"python": [sys.executable], "make": ["make", f"VENV={sys.prefix}"]}
    starts["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    options = {"capture_output": True, "text": True, "cwd": folder, "timeout": 600}
    options["env"] = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*starts[first], *rest], stdin=subprocess.DEVNULL, **options)


LINES = dict.fromkeys(tuple(words) for path in TEXTS for words in commands(path))
OURS = [w for w in LINES if not any(re.match(begin, " ".join(w)) for begin in ELSEWHERE)]


def test_every_exception_is_of_a_command_on_the_pages():
    texts = [" ".join(words) for words in LINES]
    assert [each for each in ELSEWHERE if not any(re.match(each, text) for text in texts)] == []
    parts = REFUSED | NEEDS
    assert [each for each in parts if not any(each in text for text in texts)] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", OURS, ids=lambda words: " ".join(words)[:70])
def test_commands_run(words, checkout):
    text = " ".join(words)
    for part, package in NEEDS.items():
        if part in text:
            pytest.importorskip(package, reason=f"{package} is not installed")
    done = run(small(list(words)), checkout)
    refused = [named for part, named in REFUSED.items() if part in text]
    if refused:
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "error" in last and refused[0] in last, done.stderr
    else:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
