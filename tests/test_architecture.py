"""The rules that the source keeps: layers, sizes, names, docstrings, safe loading, clean text.

Every rule is a function from source files to complaints. One test runs each rule over the checkout,
another shows each rule planted violations that it must find, a third what it must let pass.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import pytest
import source_tree
from source_tree import PACKAGES, import_targets, length, read_sources

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {"rl_dist": {"rl_dist"}, "envs": {"envs"}, "agents": {"agents", "rl_dist"}}
LAYOUT = "envs.vector.layout"  # plain data, no torch: agents may import it
# no torch: envs may import them
LEAVES = ("rl_dist.errors", "rl_dist.flags")
LEAVES += ("rl_dist.process_group.process_ends",)
FOREIGN = {"rl_dist": ("gymnasium",), "envs": ("torch.distributed",), "agents": ()}
COMMANDS = {  # parts of agents that may import envs
    *(f"evaluate/{name}" for name in ("command", "episodes", "final", "markets", "pictures")),
    "run/auto",
    *("config", "run/choice", "run/limits", "run/resumed", "run/saved", "run/start"),
    *("api/policy", "api/training", "export/check", "export/contract", "export/step"),
    *("pretrain/command", "pretrain/weights", "pretrain/windows"),
}
PRINTERS = {  # parts of rl_dist that may print
    *("errors", "checkpoint/__main__", "machine", "run_dir", "setup_check"),
    *("launch/ranks", "launch/supervisor", "resume_check", "speedup/__main__", "speedup/estimate"),
    *("status", "supervised/fit", "telemetry/progress"),
}
MAX_UNITS, MAX_MODULES, MAX_FILE, MAX_FUNCTION, MAX_MEDIAN, MAX_FIRST_LINE = 15, 10, 450, 80, 15, 79
MAX_LEARNER = {"update": 65, "collect": 65}  # lines of these functions in agents
# Totals only fall. Tokens, because packing lines does not lower them.
MAX_SIZES = {
    "tokens of source": 158_900,
    "tokens of tests": 180_900,
    "tokens of benchmarks": 22_100,
    "lines of README.md": 150,
    "tokens of the path to loss.backward()": 23_900,
}
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECT_COLLECTIVES = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")
COLLECTIVES = re.compile(r"all_reduce|all_gather(_into_tensor)?|reduce_scatter|broadcast|barrier")
SOME_RANKS = r"\brank (==|!=|>|<) \d|\bis_main|\bmain_process"
# in pieces, so that this file does not hold what it forbids
PRIVATE_TEXT = r"(?<![\w.~-])/(work|root|tmp/(venv|w))" + "/" + r"|\bpypi" + r"\.org|pythonhosted"
PRIVATE_TEXT += r"\.org|download" + r"\.pytorch\.org|npmjs" + r"\.(org|com)|deb" + r"\.debian\.org"


def shipped(sources):
    return [source for source in sources if source.shipped]


def layers(sources):
    """envs import leaves of rl_dist, agents only rl_dist; commands and scripts more."""
    python = (s.path.split("/")[0].removesuffix(".py") for s in sources if s.path.endswith(".py"))
    ours = {*python, *PACKAGES}
    for source in (s for s in sources if s.package in LAYERS):
        part = source.path.partition("/")[2].removesuffix(".py")
        commands = source.package == "agents" and part in COMMANDS
        allowed = LAYERS[source.package] | ({"envs"} if commands else set())
        for line, name in import_targets(source):
            if source.package == "envs" and name.startswith(LEAVES):
                continue
            if source.package == "agents" and name.startswith(LAYOUT):
                continue
            foreign = any(f"{name}.".startswith(f"{f}.") for f in FOREIGN[source.package])
            if name.split(".")[0] in ours - allowed or foreign:
                yield f"{source.path}:{line} imports {name}"


def cycles(sources):
    """No module imports itself through others, not even inside a function."""
    modules = {s.module: s for s in shipped(sources)}
    graph = {}
    for name, source in modules.items():
        hits = (t if t in modules else t.rpartition(".")[0] for _, t in import_targets(source))
        graph[name] = {hit for hit in hits if hit in modules and hit != name}
    while True:  # take away whatever imports nothing that is left
        free = [name for name, targets in graph.items() if not targets & graph.keys()]
        if not free:
            break
        for name in free:
            del graph[name]
    if graph:
        yield f"a cycle of imports among {sorted(graph)}"


def units(sources):
    """A package has at most 15 units, and a folder inside it at most ten modules."""
    for package in PACKAGES:
        count = len(source_tree.unit_names(sources, package))
        if count > MAX_UNITS:
            yield f"{package} has {count} units, more than {MAX_UNITS}"
    paths = [Path(source.path) for source in shipped(sources)]
    folders = Counter(path.parent for path in paths if not path.name.endswith("__.py"))
    for folder, count in folders.items():
        if len(folder.parts) > 1 and count > MAX_MODULES:
            yield f"{folder} has {count} modules"


def sizes(sources):
    """Files, functions and the whole keep within their limits; the tests only as a whole."""
    for what, count in source_tree.size_counts(sources).items():
        if count > MAX_SIZES[what]:
            yield f"{count} {what}, more than {MAX_SIZES[what]}"
    for source in sources:
        counted = source.path.endswith(".py") and source.package != "tests"
        if counted and source.num_lines > MAX_FILE:
            yield f"{source.path} has {source.num_lines} lines"
    for source in shipped(sources):
        special = MAX_LEARNER if source.package == "agents" else {}
        for node in source.functions():
            if length(node) > special.get(node.name, MAX_FUNCTION):
                yield f"{source.path}:{node.lineno} {node.name} has {length(node)} lines"
    lengths = [length(n) for s in sources if s.package in PACKAGES for n in s.functions()]
    if lengths and median(lengths) > MAX_MEDIAN:
        yield f"the median function has {median(lengths)} lines"


def file_names(sources):
    """No file or package has a name that could hold anything."""
    for source in sources:
        names = source.path.removesuffix(".py").split("/")
        if source.path.endswith(".py") and BAD_NAMES & set(names):
            yield source.path


def class_names(sources):
    """Two classes never share a name."""
    found = defaultdict(list)
    for source in shipped(sources):
        for node in source.nodes(ast.ClassDef):
            found[node.name].append(source.path)
    for name, paths in found.items():
        if len(paths) > 1:
            yield f"{name} in {', '.join(paths)}"


def field_names(sources):
    """Nothing is called dones: it is `episode_start`, `terminated` or `truncated`."""
    for source in (s for s in sources if s.shipped or s.package == "benchmarks"):
        for node in source.nodes(ast.AST):
            if any(getattr(node, f, "") == "dones" for f in ("id", "arg", "attr", "name", "value")):
                yield f"{source.path}:{getattr(node, 'lineno', '?')} says dones"


def docstrings(sources):
    """Modules, public functions and classes have docstrings, first lines of < 80 characters."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def public(body):
        return [n for n in body if isinstance(n, kinds) and not n.name.startswith("_")]

    for source in shipped(sources):
        top = public(source.tree.body)
        members = [m for node in top if isinstance(node, ast.ClassDef) for m in public(node.body)]
        for node in [source.tree, *top, *members]:
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first) > MAX_FIRST_LINE or not (first or node in members):
                name = getattr(node, "name", "the module")
                yield f"{source.path}: docstring of {name}, {len(first)} characters"


def config_classes(sources):
    """Every class ...Config is a `configuration`, or a frozen dataclass of keyword-only fields."""
    for source in shipped(sources):
        for node in source.nodes(ast.ClassDef):
            made = " ".join(map(ast.unparse, node.decorator_list))
            wanted = ("dataclass", "frozen=True", "kw_only=True")
            is_frozen = made == "configuration" or all(word in made for word in wanted)
            if node.name.endswith("Config") and not is_frozen:
                yield f"{source.path}:{node.lineno} {node.name} is no frozen, kw_only dataclass"


def unsafe_loading(sources):
    """torch.load only with weights_only=True; no pickle outside the tests, which may try to."""
    for source in sources:
        targets = import_targets(source)
        if source.package != "tests":
            for line, name in targets:
                if name.split(".")[0] in PICKLERS:
                    yield f"{source.path}:{line} imports {name}"
        imported = (alias for node in source.nodes(ast.Import) for alias in node.names)
        loads = {f"{a.asname}.load" for a in imported if a.name == "torch" and a.asname}
        loads |= {"torch.load"} | {"load" for _, name in targets if name == "torch.load"}
        for node in source.nodes(ast.Call):
            name, keywords = (
                ast.unparse(node.func),
                {k.arg: ast.unparse(k.value) for k in node.keywords},
            )
            if name in loads and keywords.get("weights_only") != "True":
                yield f"{source.path}:{node.lineno} torch.load without weights_only=True"
            if keywords.get("allow_pickle") == "True" or name.endswith(".read_pickle"):
                yield f"{source.path}:{node.lineno} loads a pickle"


def object_collectives(sources):
    """No collective that pickles objects."""
    for source in sources:
        for node in source.nodes(ast.Name, ast.Attribute, ast.alias):
            name = next(getattr(node, f) for f in ("id", "attr", "name") if hasattr(node, f))
            if OBJECT_COLLECTIVES.fullmatch(name.split(".")[-1]):
                yield f"{source.path}:{node.lineno} uses {name}"


def lonely_collectives(sources):
    """No collective call inside a branch that only some ranks take."""
    for source in shipped(sources):
        for branch in source.nodes(ast.If):
            if re.search(SOME_RANKS, ast.unparse(branch.test)):
                for node in (n for part in branch.body + branch.orelse for n in ast.walk(part)):
                    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                    if COLLECTIVES.fullmatch(name.split(".")[-1]):
                        yield f"{source.path}:{node.lineno} collective on some ranks only"


def printing(sources):
    """rl_dist does not print, but for the modules whose task it is."""
    for source in (s for s in sources if s.package == "rl_dist"):
        if source.path.partition("/")[2].removesuffix(".py") not in PRINTERS:
            for node in source.nodes(ast.Call):
                if ast.unparse(node.func) == "print":
                    yield f"{source.path}:{node.lineno} prints"


def private_text(sources):
    """No path of somebody's machine and no host of a package index stands in the repository."""
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), 1):
            if match := re.search(PRIVATE_TEXT, line):
                yield f"{source.path}:{number} says {match.group()}"


DOC = '"""Says what it is."""\n'


def lines(count, name):
    """A file with one function of that many lines."""
    return f'{DOC}def {name}():\n    """Says what it does."""\n' + "    x = 1\n" * (count - 2)


WORLD, ENV, A = "rl_dist/process_group/world.py", "envs/trading/environment.py", "agents/a.py"
LONG = "'''" + "x" * 80 + "'''"
PLANTED = {
    layers: [
        {WORLD: "import envs"}, {WORLD: "def f():\n    from agents.ppo import PPO"},
        {WORLD: "import gymnasium"}, {ENV: "from ...rl_dist.process_group import world"},
        {ENV: "from torch import distributed"}, {"agents/trainer.py": "from envs.trading import E"},
        {A: "from envs.vector.spaces import leaves"},
        {A: "import train_distributed", "train_distributed.py": ""},
    ],
    cycles: [
        {A: "from agents.b import x", "agents/b.py": "from . import a"},
        {A: "import agents.b", "agents/b.py": "import agents.c", "agents/c.py": "from .a import f"},
    ],
    units: [
        {f"envs/a{i}.py": "" for i in range(16)}, {f"envs/a/b{i}.py": "" for i in range(11)},
    ],
    sizes: [
        {"envs/a.py": "x = 1\n" * 451}, {"README.md": "x\n" * 151},
        {"agents/ppo.py": "x = 1\n" * 8_000}, {"tests/test_a.py": "x = 1\n" * 70_000},
        {"examples/a.py": "x = 1\n" * 70_000}, {"benchmarks/a.py": "x = 1\n" * 70_000},
        {"agents/ppo.py": lines(66, "update")}, {"a.py": lines(81, "main")},
        {A: lines(16, "f"), "envs/a.py": lines(17, "f")},
    ],
    file_names: [{"envs/utils.py": ""}, {"agents/core/a.py": ""}],
    class_names: [{A: "class Report: pass\nclass Box: pass", "envs/a.py": "class Box: pass"}],
    field_names: [
        {A: text} for text in ("def f(dones): pass", "a.dones", "x = {'dones': 1}", "A(dones=1)")
    ],
    docstrings: [
        {A: "x = 1"}, {A: DOC + "def f(): pass"}, {A: DOC + "class A: pass"},
        {A: f"{DOC}class A:\n  '''A'''\n  def f():\n    {LONG}"},
    ],
    config_classes: [{A: "@dataclass(frozen=True)\nclass PPOConfig: pass"}],
    unsafe_loading: [
        {A: "import torch\ntorch.load(path)"}, {A: "from torch import load\nload(path)"},
        {A: "import torch as t\nt.load(path, weights_only=False)"}, {A: "import pickle"},
        {"benchmarks/a.py": "numpy.load(path, allow_pickle=True)"},
    ],
    object_collectives: [
        {A: "dist.all_gather_object(x, y)"}, {A: "from torch.distributed import gather_object"},
    ],
    lonely_collectives: [
        {A: "if world.rank == 0:\n    x = 1\n    dist.broadcast(x, 0)"},
        {A: "if world.is_main:\n    pass\nelse:\n    barrier()"},
    ],
    printing: [{WORLD: "print('hello')"}],
    private_text: [
        {"docs/a.md": "see /wo" + "rk/shared"}, {".ci/run": "cd /ro" + "ot/x"},
        {"Makefile": "pip install --index-url https://py" + "pi.org/simple"},
    ],
}  # fmt: skip
CONFIG = "@dataclass(frozen=True, kw_only=True)\nclass PPOConfig:\n    '''Says so.'''"
CLEAN = {
    "agents/__init__.py": DOC,
    "agents/advantages.py": DOC
    + "from envs.vector.layout import Layout\n"
    + "from rl_dist import world\ntorch.load(path, weights_only=True)",
    "agents/evaluate/markets.py": DOC + "import envs\nfrom agents.advantages import gae\nprint(1)",
    "agents/ppo.py": lines(80, "train"),
    "agents/sizes.py": DOC + CONFIG,
    "envs/__init__.py": DOC + "from envs.trading import Trading",
    ENV: lines(8, "f") + "def _private():\n    from envs import accounting",
    "envs/trading/accounting.py": lines(15, "update"),
    WORLD: DOC + "import torch.distributed\nif world.rank == 0:\n    log.write(x)\nbroadcast(x)",
    "rl_dist/status.py": DOC + "try: f()\nexcept OSError: pass\nprint('hello')",
    "train_distributed.py": lines(3, "main") + "import agents, envs, rl_dist",
    "README.md": "--data ../shared/data/prices.csv, https://example.org/work/page",
    "runs/a.py": "import pickle",
}


def written(root, files):
    """The sources below root, once these files are there."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_sources(root)


@pytest.fixture(scope="module")
def checkout():
    return read_sources(ROOT)


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps_the_rule(rule, checkout):
    found = list(rule(checkout))
    assert not found, f"{rule.__doc__} Found:\n" + "\n".join(found)


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_planted_violations_are_found(rule, tmp_path):
    for number, files in enumerate(PLANTED[rule]):
        assert list(rule(written(tmp_path / str(number), files))), files


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_clean_source_passes(rule, tmp_path):
    assert list(rule(written(tmp_path, CLEAN))) == []
