"""README and docs/: short, without dead links, with commands that exist, and a site that builds."""

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from agents.run.choice import OTHER_NAMES, parse_training
from agents.run.config import OWNERS, SECTIONS
from rl_dist.flags import fields_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *PAGES]
TRAINING = "train_distributed.py"
TREE_STARTS = "train_distributed.py     "
MARK = re.compile(r"<!-- generated: ([^>]+?) -->")


@cache
def generated():
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs/generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fences(text):
    """The lines of all code blocks; those that end in a backslash are joined."""
    inside, joined = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside and line.endswith("\\"):
            joined += line[:-1]
        elif inside:
            yield (joined + line).strip()
            joined = ""


def commands(path):
    """The commands of a text that start our programs, as words without variables."""
    for line in fences(path.read_text()):
        if re.match(r"(PYTHONPATH=\S+ )?(python|make|torchrun) ", line):
            words = shlex.split(line.removesuffix("&"), comments=True)
            words = words[words[0].startswith("PYTHONPATH=") :]
            if words[0] != "torchrun" or TRAINING in words:
                yield words


ALL_COMMANDS = [
    pytest.param(words, id=" ".join(words)[:60]) for path in TEXTS for words in commands(path)
]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_relative_links_and_images_exist(path):
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("words", ALL_COMMANDS)
def test_commands_have_flags_that_exist(words):
    if words[0] == "make":
        check_make(words[1:])
    elif TRAINING in words:
        check_training(words[words.index(TRAINING) + 1 :])
    elif words[1] != "-c":
        check_other(words)


def check_training(argv):
    """Exits where a flag or a value is wrong."""
    parse_training(argv)


def check_make(words):
    names = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert words[0] in names
    for word in words[1:]:
        assert re.match(r"(ARGS|VENV|PYTHON)=", word)
        if words[0] == "train" and word.startswith("ARGS="):
            check_training(shlex.split(word.removeprefix("ARGS=")))


def check_other(words):
    name = words[2] if words[1] == "-m" else words[1]
    exists = importlib.util.find_spec(name) if words[1] == "-m" else (ROOT / name).is_file()
    assert exists, f"there is no {name}"
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    if flags:
        assert flags <= flags_of(" ".join(words[: 3 if words[1] == "-m" else 2]))


@cache
def flags_of(command):
    """The flags of a program, and those of training where it passes them on."""
    if command in generated().COMMANDS:
        text = generated().help_of(command)
    else:
        argv = [sys.executable, *command.split()[1:], "--help"]
        text = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    own = set(re.findall(r"--\w+", text))
    passes_on = "training flags" in text or TRAINING in text
    return own | {f"--{name}" for name in OWNERS} if passes_on else own


def migrations():
    """Rows of the tables of settings: the names of another trainer, and our flags for them."""
    for line in (ROOT / "docs/migrating.md").read_text().splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 5 and "`" in cells[0]:
            yield re.findall(r"`(\w+)`", cells[0]), re.findall(r"`--(\w+)", cells[2]), cells


def test_other_trainers_settings_lead_to_flags_that_exist_and_to_those_of_the_error_line():
    rows = list(migrations())
    known = OWNERS.keys() | {"run_dir", "resume"}
    assert len(rows) > 50
    for theirs, ours, cells in rows:
        assert set(ours) <= known and (ours or cells[2].strip() == "none"), theirs
        hints = {OTHER_NAMES[name] for name in theirs if name in OTHER_NAMES}
        assert hints <= set(ours), f"{theirs}: an unknown flag of that name is answered otherwise"
    text = (ROOT / "docs/migrating.md").read_text()
    known |= {"video", "preset"} | {f"no-{name}" for name in OWNERS}
    named = set(re.findall(r"`--([\w-]+)", text))
    assert sorted(named - known) == []


# fields of Args in cleanrl/ppo_atari_lstm.py of vwxyzjn/cleanrl, branch master
CLEANRL = """
exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video env_id
total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda num_minibatches
update_epochs norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl batch_size
minibatch_size num_iterations
"""
# keys of the parameter table in rl_games 1.6.5's README but for SAC's and those inside lists of
# layers, of configs/ppo_cartpole_masked_velocity_rnn.yaml, and what else common/a2c_common.py reads
RL_GAMES = """
seed torch_threads load_checkpoint load_path algo model network separate space fixed_sigma
sigma_init cnn mlp units d2rl activation initializer normalization regularizer rnn name layers
mu_activation sigma_activation mu_init before_mlp concat_input layer_norm reward_shaper
normalize_advantage gamma tau learning_rate save_best_after save_frequency score_to_win grad_norm
entropy_coef truncate_grads env_name env_config e_clip clip_value num_actors horizon_length
seq_length minibatch_size minibatch_size_per_env mini_epochs critic_coef lr_schedule schedule_type
kl_threshold normalize_input normalize_value bounds_loss_coef bound_loss_type clip_actions
max_epochs max_frames use_diagnostics value_bootstrap use_smooth_clamp zero_rnn_on_done player
games_num deterministic render use_vecenv evaluation dir_to_monitor update_checkpoint_freq
games_to_track print_stats ppo weight_decay schedule_entropy normalize_rms_advantage
epochs_between_resets freeze_critic central_value_config self_play population_based_training
use_action_masks multi_gpu device mixed_precision full_experiment_name train_dir
"""


def recurrent_ppo():
    contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    return inspect.signature(contrib.RecurrentPPO).parameters.keys() - {"_init_setup_model"}


@pytest.mark.parametrize(
    "heading, settings",
    [("sb3-contrib", recurrent_ppo), ("CleanRL", CLEANRL.split), ("rl_games", RL_GAMES.split)],
)
def test_the_migration_page_names_all_settings(heading, settings):
    sections = (ROOT / "docs/migrating.md").read_text().split("\n## ")
    section = next(each for each in sections if each.startswith(heading))
    rows = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| "))
    assert sorted(set(settings()) - set(re.findall(r"`(\w+)`", rows))) == []


def test_the_tree_of_the_readme_exists():
    folder = ROOT
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(TREE_STARTS))
    for line in lines[start : lines.index("```", start)]:
        words = re.split(r"\s{2,}|(?<=/) ", line.strip())
        names = [word for word in words if re.fullmatch(r"[\w.]+/|\w+\.py", word)]
        inside = folder if line.startswith("  ") else ROOT
        assert [name for name in names if not (inside / name).exists()] == []
        if inside == ROOT and names and names[0].endswith("/"):
            folder = ROOT / names[0]


def test_every_mark_of_the_pages_becomes_text():
    marks = [mark for page in PAGES for mark in MARK.findall(page.read_text())]
    assert {"flags", "metrics", "presets", "signals", "help"} <= set(marks)
    assert all(generated().generate(mark).strip() for mark in marks)


def test_the_tables_hold_every_flag_with_its_default():
    text = generated().generate("flags")
    for name, section in SECTIONS.items():
        for flag in fields_of(section):
            assert f"`--{flag}`" in text, name
    assert re.search(r"`--batch_size` \| 128 ", text)


def test_guarantees_name_tests_that_exist():
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py)", (ROOT / "docs/guarantees.md").read_text()))
    paths = list(ROOT.glob("tests/**/*.py"))
    known = set(re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in paths)))
    assert sorted(named - known - {path.stem for path in paths}) == []


def literals():
    """All texts of the source, with a gap where a value is put in."""
    folders = ("rl_dist", "agents", "envs")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = getattr(node, "values", [node])
                yield "".join(str(getattr(part, "value", "...")) for part in parts)


def test_messages_that_troubleshooting_quotes_exist():
    rows = (ROOT / "docs/troubleshooting.md").read_text().split("\n| `")[1:]
    quoted = [each for row in rows for each in re.findall("`([^`]+)`", "`" + row.split(" | ")[0])]
    texts = "\n".join(literals())
    parts = {part.strip() for each in quoted for part in each.split("...")}
    assert len(quoted) > 30 and [part for part in sorted(parts) if part not in texts] == []


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    elsewhere = r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(https?:[^\"]+)"
    for page in tmp_path.rglob("*.html"):
        assert re.findall(elsewhere, page.read_text()) == [], page.name
