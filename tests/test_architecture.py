"""The rules that the source keeps: layers, sizes, names, docstrings, safe loading, clean text.

Every rule is a function from source files to a list of complaints. One test runs each rule over the checkout, another
shows each rule a planted violation that it must find, and a third a clean example that it must let pass.
"""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl_dist", "envs", "agents")
# These may build environments themselves.
COMMANDS = {
    f"agents/{name}.py"
    for name in (
        *("dry_run/announce", "dry_run/memory_advice", "evaluate/command", "evaluate/final", "evaluate/plots"),
        *("run/choice", "run/config"),
        *("pretrain/command", "pretrain/weights", "pretrain/windows"),
    )
}
LAYERS = {"rl_dist": {"rl_dist"}, "envs": {"envs"}, "agents": {"agents", "rl_dist"}}
LEAVES = ("rl_dist.errors", "rl_dist.config", "rl_dist.seeding")  # without torch; the only part of ours envs may import
# Units are the modules and packages right below a package of ours: how many, edges between them, layers.
MAX_UNITS = {"rl_dist": (14, 45, 6), "agents": (14, 45, 6), "envs": (14, 45, 6)}
MAX_MODULES = 10  # in a package
FOREIGN = {"rl_dist": ("gymnasium",), "envs": ("torch.distributed",), "agents": ()}  # what a layer must not know
PRINTERS = {
    f"rl_dist/{name}.py"
    for name in (
        *("errors", "checkpoint/command", "checkpoint/run_lock", "hardware/report", "launch/rank_group"),
        *("launch/supervisor", "resume_check/command", "speedup/command", "status/command", "telemetry/progress"),
    )
}
SPECIAL_LENGTH = {"update": 65, "collect": 65}  # lines, in agents; `train` and all others: MAX_FUNCTION
MAX_FILE, MAX_FUNCTION, MAX_MEDIAN, MAX_FIRST_LINE = 450, 80, 15, 79
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast", "barrier"}
# In pieces, so that this file does not hold what it forbids.
PRIVATE_TEXT = [r"(?<![\w.~-])/(work|root|tmp/(venv|w))" + "/", r"\bpypi" + r"\.org", "pythonhosted" + r"\.org",
                "download" + r"\.pytorch\.org", "npmjs" + r"\.(org|com)", "deb" + r"\.debian\.org"]  # fmt: skip
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".html", ".sh", ".json"}
SKIPPED_FOLDERS = {".git", ".venv", "runs", "shared", "build", "dist", "site", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One text file of the checkout; `tree` is its syntax tree where it is Python."""

    path: str  # from the root of the checkout, with slashes
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def shipped(self) -> bool:
        return self.package in PACKAGES or (not self.package and self.path.endswith(".py"))

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def skipped(folder: Path) -> bool:
    """Whether a folder is no part of the repository."""
    made = folder.name in SKIPPED_FOLDERS or folder.name.endswith(("_cache", ".egg-info"))
    return made or (folder / "pyvenv.cfg").exists()


def read_sources(root: Path) -> list[Source]:
    """Every text file of a checkout, without what runs, tools and environments leave in it."""
    sources = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not skipped(Path(folder, f)))
        for path in (Path(folder, name) for name in sorted(names)):
            if path.name == ".git" or path.suffix not in TEXT_SUFFIXES:  # a worktree has a file of that name
                continue
            if path.is_file() and path.stat().st_size < 1_000_000:
                text = path.read_text(encoding="utf-8", errors="replace")
                tree = ast.parse(text) if path.suffix == ".py" else ast.Module(body=[], type_ignores=[])
                sources.append(Source(path.relative_to(root).as_posix(), text, tree))
    return sources


# ---- layers


def import_targets(source: Source) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported; for `from a import b` the name is a.b."""
    targets = []
    typing_only = {id(n) for branch in source.nodes(ast.If) if is_typing_only(branch) for n in ast.walk(branch)}
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            targets += [(node.lineno, alias.name) for alias in node.names]
            continue
        base = node.module or ""
        if node.level:
            parts = source.module.split(".")
            parts = parts[: len(parts) - node.level + source.path.endswith("__init__.py")]
            base = ".".join([*parts, base]).rstrip(".")
        targets += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return targets


def is_typing_only(branch: ast.AST) -> bool:
    """Whether a branch is for type checkers, and imports nothing when the program runs."""
    return isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"


def layers(sources: list[Source]) -> list[str]:
    """envs import leaves of rl_dist, agents only rl_dist; commands and scripts more."""
    ours = {s.path.split("/")[0].removesuffix(".py") for s in sources if s.path.endswith(".py")} | set(PACKAGES)
    found = []
    for source in sources:
        if source.package not in LAYERS:
            continue
        allowed = LAYERS[source.package] | ({"envs"} if source.path in COMMANDS else set())
        for line, name in import_targets(source):
            if source.package == "envs" and name.startswith(LEAVES):
                continue
            if name.split(".")[0] in ours - allowed:
                found.append(f"{source.path}:{line} imports {name}")
            if any(name == f or name.startswith(f + ".") for f in FOREIGN[source.package]):
                found.append(f"{source.path}:{line} imports {name}, which {source.package} must not know")
    return found


def cycles(sources: list[Source]) -> list[str]:
    """No module imports itself through others, not even inside a function."""
    modules = {s.module: s for s in sources if s.shipped}
    graph = {}
    for name, source in modules.items():
        hits = (t if t in modules else t.rpartition(".")[0] for _, t in import_targets(source))
        graph[name] = sorted({h for h in hits if h in modules and h != name})
    state: dict[str, int] = {}  # 1 while on the path, 2 when done
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for target in graph[name]:
            if state.get(target) == 1:
                found.append(" -> ".join([*path[path.index(target) :], target]))
            elif target not in state:
                visit(target, [*path, target])
        state[name] = 2

    for name in graph:
        if name not in state:
            visit(name, [name])
    return found


def unit_graph(sources: list[Source], package: str) -> dict[str, set[str]]:
    """The units of a package and which others each imports."""
    mine = {s.module: s for s in sources if s.package == package and s.module != package}
    graph: dict[str, set[str]] = {module.split(".")[1]: set() for module in mine}
    for module, source in mine.items():
        targets = {name.split(".")[1] for _, name in import_targets(source) if name.startswith(f"{package}.")}
        graph[module.split(".")[1]] |= (targets & graph.keys()) - {module.split(".")[1]}
    return graph


def depth(graph: dict[str, set[str]], unit: str, path: tuple[str, ...] = ()) -> int:
    """Layers from a unit down; a cycle counts as very many."""
    return 1000 if unit in path else 1 + max((depth(graph, t, (*path, unit)) for t in graph[unit]), default=0)


def units(sources: list[Source]) -> list[str]:
    """A package of ours has few units, few imports between them, and few layers."""
    found = []
    for package, limits in MAX_UNITS.items():
        graph = unit_graph(sources, package)
        counts = (len(graph), sum(map(len, graph.values())), max((depth(graph, unit) for unit in graph), default=0))
        for what, count, limit in zip(("units", "imports between units", "layers"), counts, limits, strict=True):
            if count > limit:
                found.append(f"{package} has {count} {what}, more than {limit}")
    return found


def packages(sources: list[Source]) -> list[str]:
    """A package has at most ten modules."""
    folders = [s.path.rpartition("/")[0] for s in sources if s.shipped and s.path.count("/") == 2]
    ours = [s for s in sources if s.shipped and s.path.count("/") == 2 and not s.path.endswith("__.py")]
    counts = {folder: sum(s.path.startswith(f"{folder}/") for s in ours) for folder in folders}
    return [f"{folder} has {n} modules" for folder, n in counts.items() if n > MAX_MODULES]


# ---- sizes and names


def functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    return list(source.nodes(ast.FunctionDef, ast.AsyncFunctionDef))


def length(node: ast.AST) -> int:
    """Lines from `def` to the last one, docstring included."""
    return node.end_lineno - node.lineno + 1


def file_sizes(sources: list[Source]) -> list[str]:
    """No file outside the tests is over 400 lines."""
    python = (s for s in sources if s.path.endswith(".py") and s.package != "tests")
    return [f"{s.path} has {n} lines" for s in python if (n := len(s.text.splitlines())) > MAX_FILE]


def file_names(sources: list[Source]) -> list[str]:
    """No file or package has a name that could hold anything."""
    python = (s for s in sources if s.path.endswith(".py"))
    return [s.path for s in python if BAD_NAMES & set(s.path.removesuffix(".py").split("/"))]


def function_sizes(sources: list[Source]) -> list[str]:
    """No function is over 80 lines, `update` and `collect` not over 65."""
    found = []
    for source in (s for s in sources if s.shipped):
        for node in functions(source):
            limit = SPECIAL_LENGTH.get(node.name, MAX_FUNCTION) if source.package == "agents" else MAX_FUNCTION
            if length(node) > limit:
                found.append(f"{source.path}:{node.lineno} {node.name} has {length(node)} lines, over {limit}")
    return found


def median_function(sources: list[Source]) -> list[str]:
    """The median function of the packages has at most 15 lines."""
    lengths = [length(node) for s in sources if s.package in PACKAGES for node in functions(s)]
    middle = median(lengths) if lengths else 0
    return [f"the median function has {middle} lines"] if middle > MAX_MEDIAN else []


def field_names(sources: list[Source]) -> list[str]:
    """Nothing is called dones: it is `episode_start`, `terminated` or `truncated`."""
    found = []
    for source in (s for s in sources if s.shipped or s.package == "benchmarks"):
        for node in ast.walk(source.tree):
            names = {getattr(node, field, None) for field in ("id", "arg", "attr", "name", "value")}
            if "dones" in {n for n in names if isinstance(n, str)}:
                found.append(f"{source.path}:{getattr(node, 'lineno', '?')} says dones")
    return found


def public_nodes(source: Source) -> Iterator[tuple[ast.AST, bool]]:
    """The module, its public functions and classes and their public methods; whether each needs a docstring."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    yield source.tree, True
    for node in (n for n in source.tree.body if isinstance(n, kinds) and not n.name.startswith("_")):
        yield node, True
        members = node.body if isinstance(node, ast.ClassDef) else []
        yield from ((m, False) for m in members if isinstance(m, kinds) and not m.name.startswith("_"))


def docstrings(sources: list[Source]) -> list[str]:
    """Modules and public functions and classes say what they are, in a first line under 80 characters."""
    found = []
    for source in (s for s in sources if s.shipped):
        for node, needed in public_nodes(source):
            where = f"{source.path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'the module')}"
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if needed and not first:
                found.append(f"{where} has no docstring")
            if len(first) > MAX_FIRST_LINE:
                found.append(f"{where}: the docstring's first line has {len(first)} characters")
    return found


def config_classes(sources: list[Source]) -> list[str]:
    """Every class ...Config is a frozen dataclass with keyword-only fields."""
    found = []
    for source in (s for s in sources if s.shipped):
        for node in (n for n in source.nodes(ast.ClassDef) if n.name.endswith("Config")):
            said = " ".join(ast.unparse(d) for d in node.decorator_list)
            if not ("dataclass" in said and "frozen=True" in said and "kw_only=True" in said):
                found.append(f"{source.path}:{node.lineno} {node.name} is no frozen, kw_only dataclass")
    return found


# ---- errors, loading, collectives, output


def swallowed_errors(sources: list[Source]) -> list[str]:
    """No bare except, and nothing that catches every exception and does nothing."""
    found = []
    for source in sources:
        for node in source.nodes(ast.ExceptHandler):
            silent = all(isinstance(n, ast.Pass | ast.Continue) for n in node.body)
            if node.type is None or (silent and ast.unparse(node.type) in ("Exception", "BaseException")):
                found.append(f"{source.path}:{node.lineno} swallows errors")
        for node in source.nodes(ast.Call):
            if re.fullmatch(r"(contextlib\.)?suppress\((Base)?Exception\)", ast.unparse(node)):
                found.append(f"{source.path}:{node.lineno} swallows errors")
    return found


def unsafe_loading(sources: list[Source]) -> list[str]:
    """torch.load only with weights_only=True; no pickle outside the tests (they may try what can be pickled)."""
    found = []
    for source in sources:
        targets = import_targets(source)
        if source.package != "tests":
            found += [f"{source.path}:{at} imports {n}" for at, n in targets if n.split(".")[0] in PICKLERS]
        loads = {"torch.load"} | {f"{alias}.load" for alias in aliases_of_torch(source)}
        loads |= {"load"} if any(name == "torch.load" for _, name in targets) else set()
        for node in source.nodes(ast.Call):
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if ast.unparse(node.func) in loads and keywords.get("weights_only") != "True":
                found.append(f"{source.path}:{node.lineno} torch.load without weights_only=True")
            if keywords.get("allow_pickle") == "True" or ast.unparse(node.func).endswith(".read_pickle"):
                found.append(f"{source.path}:{node.lineno} loads a pickle")
    return found


def aliases_of_torch(source: Source) -> set[str]:
    """The names under which a file imports torch."""
    names = (alias for node in source.nodes(ast.Import) for alias in node.names)
    return {alias.asname for alias in names if alias.name == "torch" and alias.asname}


def object_collectives(sources: list[Source]) -> list[str]:
    """No collective that pickles objects."""
    found = []
    for source in sources:
        for node in source.nodes(ast.Name, ast.Attribute, ast.alias):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", "")
            if name.split(".")[-1] in OBJECT_COLLECTIVES:
                found.append(f"{source.path}:{node.lineno} uses {name}")
    return found


def lonely_collectives(sources: list[Source]) -> list[str]:
    """No collective call inside a branch that only some ranks take."""
    found = []
    for source in (s for s in sources if s.shipped):
        for branch in source.nodes(ast.If):
            if not re.search(r"\brank (==|!=|>|<) \d|\bis_main|\bmain_process", ast.unparse(branch.test)):
                continue
            for node in (n for part in branch.body + branch.orelse for n in ast.walk(part)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in COLLECTIVES:
                    found.append(f"{source.path}:{node.lineno} collective on some ranks only")
    return found


def printing(sources: list[Source]) -> list[str]:
    """rl_dist does not print, but for the modules whose task it is."""
    quiet = (s for s in sources if s.package == "rl_dist" and s.path not in PRINTERS)
    calls = ((s, node) for s in quiet for node in s.nodes(ast.Call))
    return [f"{s.path}:{n.lineno} prints" for s, n in calls if ast.unparse(n.func) == "print"]


def private_text(sources: list[Source]) -> list[str]:
    """No path of somebody's machine and no host of a package index stands in the repository."""
    pattern = re.compile("|".join(PRIVATE_TEXT))
    lines = ((s.path, i, line) for s in sources for i, line in enumerate(s.text.splitlines(), 1))
    return [f"{path}:{i} says {m.group()}" for path, i, line in lines if (m := pattern.search(line))]


# ---- the tests

RULES = (layers, cycles, units, packages, file_sizes, file_names, function_sizes, median_function, field_names,
         docstrings, config_classes, swallowed_errors, unsafe_loading, object_collectives, lonely_collectives,
         printing, private_text)  # fmt: skip
DOC = '"""Says what it is."""\n'


def lines(count: int, name: str) -> str:
    """A file with one function of that many lines."""
    return f'{DOC}def {name}():\n    """Says what it does."""\n' + "    x = 1\n" * (count - 2)


PLANTED = [
    (layers, {"rl_dist/process_group/world.py": "import envs"}),
    (layers, {"rl_dist/process_group/world.py": "def f():\n    from agents.ppo import PPO"}),
    (layers, {"rl_dist/process_group/world.py": "import gymnasium"}),
    (layers, {"envs/trading/environment.py": "from rl_dist import world"}),
    (layers, {"envs/trading/environment.py": "from ...rl_dist.process_group import world"}),
    (layers, {"envs/trading/environment.py": "from torch import distributed"}),
    (layers, {"envs/trading/environment.py": "import torch.distributed as dist"}),
    (layers, {"agents/trainer.py": "from envs.trading import TradingVectorEnv"}),
    (units, {f"envs/a{i}.py": "" for i in range(15)}),
    (units, {"envs/a.py": "from envs import b", "envs/b.py": "from envs import a"}),
    (packages, {f"envs/a/b{i}.py": "" for i in range(11)}),
    (layers, {"agents/trainer.py": "import train_distributed", "train_distributed.py": ""}),
    (cycles, {"agents/a.py": "from agents.b import x", "agents/b.py": "from . import a"}),
    (cycles, {"envs/a.py": "from envs import b", "envs/b.py": "import envs.c", "envs/c.py": "from .a import f"}),
    (cycles, {"envs/__init__.py": "from envs.a import f", "envs/a.py": "from envs import g"}),
    (file_sizes, {"envs/a.py": "x = 1\n" * 451}),
    (file_names, {"envs/utils.py": ""}),
    (file_names, {"agents/core/a.py": ""}),
    (function_sizes, {"agents/trainer.py": lines(81, "train")}),
    (function_sizes, {"agents/ppo.py": lines(66, "update")}),
    (function_sizes, {"agents/rollout.py": lines(66, "collect")}),
    (function_sizes, {"train_distributed.py": lines(81, "main")}),
    (median_function, {"agents/a.py": lines(16, "f"), "envs/a.py": lines(17, "f")}),
    (field_names, {"agents/a.py": "def f(dones): pass"}),
    (field_names, {"agents/a.py": "rollout.dones"}),
    (field_names, {"agents/a.py": "x = {'dones': 1}"}),
    (field_names, {"agents/a.py": "Rollout(dones=1)"}),
    (docstrings, {"agents/a.py": "x = 1"}),
    (docstrings, {"agents/a.py": DOC + "def f(): pass"}),
    (docstrings, {"agents/a.py": DOC + "class A: pass"}),
    (docstrings, {"agents/a.py": DOC + "def f():\n    '''" + "x" * 80 + "'''"}),
    (docstrings, {"agents/a.py": DOC + "class A:\n  '''A'''\n  def f():\n    '''" + "x" * 80 + "'''"}),
    (config_classes, {"agents/a.py": "@dataclass(frozen=True)\nclass PPOConfig: pass"}),
    (swallowed_errors, {"tests/a.py": "try: f()\nexcept: g()"}),
    (swallowed_errors, {"agents/a.py": "try: f()\nexcept Exception: pass"}),
    (swallowed_errors, {"agents/a.py": "with contextlib.suppress(Exception): f()"}),
    (unsafe_loading, {"agents/a.py": "import torch\ntorch.load(path)"}),
    (unsafe_loading, {"agents/a.py": "import torch as t\nt.load(path, weights_only=False)"}),
    (unsafe_loading, {"agents/a.py": "from torch import load\nload(path)"}),
    (unsafe_loading, {"agents/a.py": "import pickle"}),
    (unsafe_loading, {"benchmarks/a.py": "numpy.load(path, allow_pickle=True)"}),
    (object_collectives, {"rl_dist/a.py": "dist.all_gather_object(x, y)"}),
    (object_collectives, {"rl_dist/a.py": "from torch.distributed import broadcast_object_list"}),
    (lonely_collectives, {"rl_dist/a.py": "if world.rank == 0:\n    x = 1\n    dist.broadcast(x, 0)"}),
    (lonely_collectives, {"agents/a.py": "if world.is_main:\n    pass\nelse:\n    barrier()"}),
    (printing, {"rl_dist/process_group/world.py": "print('hello')"}),
    (private_text, {"docs/a.md": "see /wo" + "rk/shared"}),
    (private_text, {"Makefile": "pip install --index-url https://py" + "pi.org/simple"}),
    (private_text, {".ci/run": "cd /ro" + "ot/x"}),
]
CLEAN = {
    "agents/__init__.py": DOC,
    "agents/gae.py": DOC + "import torch\nfrom rl_dist import world\ntorch.load(path, weights_only=True)",
    "agents/evaluate/command.py": DOC + "import envs\nfrom agents.gae import gae\nprint(1)",
    "agents/ppo.py": lines(80, "train"),
    "agents/sizes.py": DOC + "@dataclass(frozen=True, kw_only=True)\nclass PPOConfig:\n    '''Says so.'''",
    "envs/__init__.py": DOC + "from envs.trading import Trading",
    "envs/trading/environment.py": lines(8, "f") + "def _private():\n    from envs import accounting",
    "envs/trading/accounting.py": lines(15, "update"),
    "rl_dist/world.py": DOC + "import torch.distributed\nif world.rank == 0:\n    log.write(x)\nbroadcast(x)",
    "rl_dist/status/command.py": DOC + "try: f()\nexcept OSError: pass\nprint('hello')",
    "train_distributed.py": lines(3, "main") + "import agents, envs, rl_dist",
    "README.md": "--data ../shared/data/prices.csv, https://example.org/work/page",
    "runs/a.py": "import pickle",
}


def write_tree(root: Path, files: dict[str, str]) -> list[Source]:
    """Writes the files below root and reads them back as the rules see them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_sources(root)


@pytest.fixture(scope="module")
def checkout() -> list[Source]:
    return read_sources(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps_the_rule(rule, checkout):
    found = rule(checkout)
    assert not found, f"{rule.__doc__} Found:\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "files"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_violation_is_found(rule, files, tmp_path):
    assert rule(write_tree(tmp_path, files))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_clean_source_passes(rule, tmp_path):
    assert rule(write_tree(tmp_path, CLEAN)) == []


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, _ in PLANTED} == set(RULES)
