"""Check rules for the source. A rule takes {path: text} and yields violations.

One test applies each rule to the checkout, another to planted violations that the rule must find.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_UNITS, MAX_FILE, MAX_FUNCTION = 18, 400, 80
MAX_LEARNER = 65  # most lines of a method `update` or `collect` in agents/
# A limit is the count at the end of the last larger piece of work, plus 2 %. Code is counted in
# tokens, because longer lines would lower a count of lines, but not a count of tokens.
MAX_SIZES = {
    "tokens of source": 129_800,
    "tokens of tests": 134_500,
    "tokens of benchmarks": 18_000,
    "lines of README.md": 150,
    "tokens of the files that lead to loss.backward()": 20_150,
}
# The files that one has to read to get from the main function of a rank to loss.backward().
READING_PATH = (
    r"agents/rank\.py|agents/learner/(trainer|recorder|rollout|advantages|ppo|policy)\.py"
    r"|agents/learner/network/(sequences|cores|inputs|noise)\.py|rl_dist/strategies/strategy\.py"
)
FILES = {  # name of a total in MAX_SIZES -> pattern of the files that it counts
    "tokens of source": r"(rl_dist|envs|agents|examples)/.*\.py|\w+\.py",
    "tokens of tests": r"tests/.*\.py",
    "tokens of benchmarks": r"benchmarks/.*\.py",
    "tokens of the files that lead to loss.backward()": READING_PATH,
}
SHIPPED = r"(rl_dist|envs|agents)/.*\.py|\w+\.py"
NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT")}
# (pattern of files, imports that are forbidden there, exceptions)
FORBIDDEN = (
    (r"rl_dist/.*", r"(agents|envs|gymnasium)\b", None),
    (
        r"envs/.*",
        r"(agents|rl_dist|torch\.distributed)\b",
        # These modules of rl_dist do not import torch.
        r"rl_dist\.(errors|flags|files|run_dir|process_group\.process_ends)\b",
    ),
    (
        r"agents/learner/.*",
        r"envs\b",
        r"envs\.vector\.layout\b",
    ),
    (
        r"(rl_dist|envs|agents)/.*",
        r"\.|(train_distributed|check_gpu_setup|tests|benchmarks)\b",
        None,
    ),
)
BAD_NAMES = r"(.*/)?(utils?|helpers?|common|misc|core|base)(/.*|\.py)"
PICKLES = r"^\s*(import|from) (c?[pP]ickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b"
PICKLES += (
    r"|allow_pickle=True|\.read_pickle\(|\b(all_gather|gather|broadcast|scatter|send|recv)_object"
)
COLLECTIVES = r"(all_reduce|all_gather|reduce_scatter|broadcast|barrier|gather|check_in_sync)\w*"
SOME_RANKS = r"\brank (==|!=|>|<) \d|\bis_main|\bmain_process"
# The strings are split, so that this file does not contain the forbidden text.
PRIVATE = r"(?<![\w.~-])/(work|root|tmp/(venv|w))" + "/" + r"|\bpypi" + r"\.org|pythonhosted"
PRIVATE += r"\.org|download" + r"\.pytorch\.org|npmjs" + r"\.(org|com)|deb" + r"\.debian\.org"

parse = cache(ast.parse)


def read(root):
    """Return {path: text} of a git checkout, without the files that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = [root / name for name in listed.stdout.splitlines()]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    return {path.relative_to(root).as_posix(): text for path, text in texts.items()}


def nodes(sources, files, *kinds):
    """Yield (path, node) of all syntax nodes of these kinds in matching Python files."""
    for path, text in sources.items():
        if path.endswith(".py") and re.fullmatch(files, path):
            yield from ((path, node) for node in ast.walk(parse(text)) if isinstance(node, kinds))


def imports(sources, files):
    """Yield (path, line, dotted name) of all imports; `from a import b` gives a.b."""
    for path, node in nodes(sources, files, ast.Import, ast.ImportFrom):
        module = ""
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + f"{node.module}."
        yield from ((path, node.lineno, module + alias.name) for alias in node.names)


def layers(sources):
    """rl_dist imports neither agents nor envs; envs and the learner import little.

    From rl_dist, envs may import only modules that do not use torch. The learner may import all of
    rl_dist, but of envs only the layout. No package has relative imports, or imports scripts or
    tests.
    """
    for files, forbidden, allowed in FORBIDDEN:
        for path, line, name in imports(sources, files):
            if re.match(forbidden, name) and not (allowed and re.match(allowed, name)):
                yield f"{path}:{line} imports {name}"


def module_of(path):
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def cycles(sources):
    """No import cycles between files or units, not even in functions or for types."""
    files = {module_of(path): set() for path in sources}
    units = {}  # a unit is a file or folder directly inside a package, such as rl_dist.launch
    for path, _, name in imports(sources, SHIPPED):
        target = name if name in files else name.rpartition(".")[0]
        if target in files:
            source = module_of(path)
            files[source] |= {target} - {source}
            pair = [".".join(module.split(".")[:2]) for module in (source, target)]
            units.setdefault(pair[0], set()).update({pair[1]} - {pair[0]})
    for graph in (files, units):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"a cycle of imports: {error.args[1]}"


# The units of agents/, highest first: a unit imports only units of lower layers.
AGENT_LAYERS = (
    {"api"}, {"rank"}, {"evaluate", "pretrain", "export"}, {"run"}, {"config"}, {"learner"},
)  # fmt: skip
LAYER = {unit: number for number, units in enumerate(AGENT_LAYERS) for unit in units}


def arrows(sources):
    """A unit of agents/ imports only lower ones: api, rank, evaluate, run, config, learner."""
    for path, line, name in imports(sources, r"agents/.*"):
        source, target = (m.split(".")[:2][-1] for m in (module_of(path), name))
        known = {source, target} <= LAYER.keys() and name.startswith("agents.")
        if known and source != target and LAYER[source] >= LAYER[target]:
            yield f"{path}:{line} imports {name}"


def units(sources):
    """A folder holds at most 18 files and folders; no name is vague."""
    paths = [path for path in sources if re.fullmatch(SHIPPED, path) and "/__" not in path]
    members = {part for path in paths for part in (path, path.rpartition("/")[0]) if "/" in part}
    for folder, count in Counter(member.rpartition("/")[0] for member in members).items():
        if count > MAX_UNITS:
            yield f"{folder} has {count} units"
    yield from (path for path in sources if re.fullmatch(BAD_NAMES, path))


def code_tokens(text):
    """Count tokens, without comments, docstrings, line ends and indentation."""
    statements = (n for n in ast.walk(parse(text)) if isinstance(n, ast.Expr))
    constants = (n.value for n in statements if isinstance(n.value, ast.Constant))
    docstrings = {(n.lineno, n.col_offset) for n in constants if isinstance(n.value, str)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in NO_CODE and t.start not in docstrings for t in tokens) - 1


def sizes(sources):
    """Files, functions and totals have size limits; of tests, only the total has one."""
    counts = {
        what: sum(code_tokens(text) for path, text in sources.items() if re.fullmatch(files, path))
        for what, files in FILES.items()
    } | {"lines of README.md": len(sources.get("README.md", "").splitlines())}
    for what, count in counts.items():
        if count > MAX_SIZES[what]:
            yield f"{count} {what}, more than {MAX_SIZES[what]}"
    for path, text in sources.items():
        if re.fullmatch(r"(?!tests/).*\.py", path) and text.count("\n") > MAX_FILE:
            yield f"{path} has {text.count(chr(10))} lines"
    for path, node in nodes(sources, SHIPPED, ast.FunctionDef):
        learns = path.startswith("agents/") and node.name in ("update", "collect")
        length = node.end_lineno - node.lineno + 1
        if length > (MAX_LEARNER if learns else MAX_FUNCTION):
            yield f"{path}:{node.lineno} {node.name} has {length} lines"


def data_alone(sources):
    """No code loads or sends pickled objects; only tests may import pickle."""
    for path, text in sources.items():
        if path.endswith(".py") and not path.startswith("tests/"):
            yield from (f"{path}: {match[0]}" for match in re.finditer(PICKLES, text, re.M))
    for path, node in nodes(sources, r".*", ast.Call):
        name = ast.unparse(node.func)
        weights_only = any(ast.unparse(k) == "weights_only=True" for k in node.keywords)
        if name == "torch.load" and not weights_only:
            yield f"{path}:{node.lineno} torch.load without weights_only=True"
    for path, line, name in imports(sources, ".*"):
        if name == "torch.load":
            yield f"{path}:{line} imports torch.load"


def lonely_collectives(sources):
    """No collective call inside a branch that only some ranks take."""
    for path, branch in nodes(sources, SHIPPED, ast.If):
        if re.search(SOME_RANKS, ast.unparse(branch.test)):
            inside = (node for part in branch.body + branch.orelse for node in ast.walk(part))
            calls = (ast.unparse(node.func) for node in inside if isinstance(node, ast.Call))
            if any(re.fullmatch(COLLECTIVES, call.split(".")[-1]) for call in calls):
                yield f"{path}:{branch.lineno}  only some ranks reach this collective"


def words(sources):
    """No name is "dones"; no text contains a local path or a package index."""
    for path, text in sources.items():
        yield from (f"{path}: {match[0]}" for match in re.finditer(PRIVATE, text))
        if re.fullmatch(SHIPPED + "|benchmarks/.*", path) and re.search(r"\bdones\b", text):
            yield f"{path} says dones"


A, WORLD = "agents/a.py", "rl_dist/process_group/world.py"
MANY = "x = 1\n" * 70_000


def lines(count, name):
    """Return the text of a file that contains one function of `count` lines."""
    return f"def {name}():\n" + "    x = 1\n" * (count - 1)


PLANTED = {
    layers: [
        {WORLD: "import envs"}, {WORLD: "def f():\n    from agents.learner.ppo import PPO"},
        {WORLD: "import gymnasium"}, {"envs/a.py": "from rl_dist.process_group import world"},
        {"envs/a.py": "from torch import distributed"},
        {"agents/learner/a.py": "from envs.trading import E"},
        {A: "import train_distributed"}, {A: "from . import b"},
    ],
    cycles: [
        {A: "from agents.b import x", "agents/b.py": "def f():\n    from agents import a"},
        {
            "envs/a/b.py": "import envs.c", "envs/c.py": "import envs.a.d", "envs/a/d.py": "",
        },
    ],
    arrows: [
        {"agents/run/a.py": "def f():\n    from agents.evaluate import b"},
        {"agents/learner/a.py": "from agents.config import RunConfig"},
        {"agents/export.py": "from agents.pretrain import main"},
    ],
    units: [
        {f"envs/a{i}.py": "" for i in range(19)}, {f"envs/a/b{i}.py": "" for i in range(19)},
        {f"envs/a{i}/b.py": "" for i in range(19)}, {"envs/utils.py": ""}, {"agents/core/a.py": ""},
    ],
    sizes: [
        {"envs/a.py": "x = 1\n" * 401}, {"README.md": "x\n" * 151}, {"tests/test_a.py": MANY},
        {"examples/a.py": MANY}, {"benchmarks/a.py": MANY}, {"agents/learner/ppo.py": MANY},
        {"agents/learner/ppo.py": lines(66, "update")}, {"a.py": lines(81, "main")},
    ],
    data_alone: [
        {A: "torch.load(path)"}, {A: "from torch import load"}, {A: "import pickle"},
        {A: "torch.load(path, weights_only=False)"}, {A: "dist.all_gather_object(x, y)"},
        {"benchmarks/a.py": "numpy.load(path, allow_pickle=True)"},
    ],
    lonely_collectives: [
        {A: "if world.rank == 0:\n    x = 1\n    dist.broadcast(x, 0)"},
        {A: "if world.is_main_process:\n    all_reduce_sum(x, world)"},
        {A: "if world.is_main:\n    pass\nelse:\n    barrier()"},
    ],
    words: [
        {A: "def f(dones): pass"}, {"docs/a.md": "see /wo" + "rk/shared"},
        {"Makefile": "pip install --index-url https://py" + "pi.org/simple"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkout():
    return read(ROOT)


RULES = pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)


@RULES
def test_the_checkout_follows_the_rule(rule, checkout):
    violations = list(rule(checkout))
    assert not violations, f"{rule.__doc__} Found:\n" + "\n".join(violations)


@RULES
def test_planted_violations_are_found(rule):
    assert [files for files in PLANTED[rule] if not list(rule(files))] == []
