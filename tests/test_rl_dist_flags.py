"""Declared fields: what is typed, saved or passed is what a section holds, or one clear line."""

import argparse
import json
import math
import pickle
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from rl_dist import flags
from rl_dist.flags import Text, configuration, recorded, setting


@configuration
class Learning:
    learning_rate: float = setting(3e-4, "1", main=True)
    """Step size at 100 %."""
    num_envs: int = setting(
        64, "envs", within=(1, 2**62 + 1), words={"auto": 1}, presets={"--quick": 8}, main=True
    )
    """Environments
    of all ranks."""
    window: int = setting(0, derived="all of them", main=True)
    anneal_lr: bool = setting(True, main=True)
    """Let the step size fall."""

    def __post_init__(self):
        if self.window > self.num_envs:
            raise ValueError(f"window {self.window} must not exceed num_envs {self.num_envs}")


@configuration
class Place:
    run_dir: Text = setting("")
    """Where to write."""
    device: Literal["auto", "cpu"] = setting("auto", main=True)
    """Where to run."""
    command: Text = setting("", stored=False)
    chosen: Literal["auto", "cpu", ""] = recorded("")


SECTIONS = {"learning": Learning, "place": Place}


@dataclass
class Run:
    learning: Learning = field(default_factory=Learning)
    place: Place = field(default_factory=Place)


def parse(*argv, sections=SECTIONS, **options):
    return flags.parse_flags(sections, argv, description="", epilog="examples", **options)


def learning(*argv):
    return parse(*argv).configs["learning"]


def test_values_go_to_their_section_and_are_remembered_as_given():
    assert parse().configs == {"learning": Learning(), "place": Place()}
    assert parse("--num_envs", "64").given == {"num_envs"}  # though it is the default
    parsed = parse("--num-envs", "8", "--learning_rate=1e-3", "--run-dir", "a-b/--c")
    assert parsed.configs["learning"] == Learning(num_envs=8, learning_rate=1e-3)
    assert parsed.configs["place"] == Place(run_dir="a-b/--c")
    assert parsed.given == {"num_envs", "learning_rate", "run_dir"}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--num_envs", "auto"], "num_envs", 1),
        (["--num_envs", "1e3"], "num_envs", 1000),
        (["--num_envs", str(2**62 + 1)], "num_envs", 2**62 + 1),
        (["--learning_rate", "-1e-3"], "learning_rate", -1e-3),
        (["--learning_rate", "3"], "learning_rate", 3.0),
        (["--no_anneal-lr"], "anneal_lr", False),
        (["--anneal-lr=on"], "anneal_lr", True),
        (["--anneal_lr", "--window=0"], "anneal_lr", True),
    ],
)
def test_values_may_be_written_in_any_usual_form(argv, name, value):
    found = getattr(learning(*argv), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_envs", "1.5"], "num_envs must be a whole number, got 1.5"),
        (["--num_envs", "-3"], f"num_envs must be auto or 2..{2**62 + 1}, got -3"),
        (["--num_envs", "1"], f"num_envs must be auto or 2..{2**62 + 1}, got 1"),
        (["--learning_rate", "nan"], "learning_rate must be a number, got nan"),
        (["--device", "tpu"], "device must be one of auto, cpu, got 'tpu'"),
        (["--run_dir", "a\x1b[2J"], "run_dir must be text, got"),
        (["--window", "65"], "window 65 must not exceed num_envs 64"),
        (["--anneal_lr=perhaps"], "anneal_lr must be true or false"),
        (["8"], "unexpected argument '8'"),
        (["--num_env", "8"], "unknown flag --num_env (did you mean --num_envs?)"),
    ],
)
def test_bad_flags_are_one_line(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_help_shows_the_main_flags_and_help_all_the_rest(capsys):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse(flag)
    short, whole = " ".join(capsys.readouterr().out.split()).split("examples")[:2]
    for part in (
        "--num_envs INT|auto Environments of all ranks (default: 64 envs; --quick: 8 envs; range:",
        "(default: all of them)",
        "--anneal_lr [true|false] Let the step size fall (default: on)",
        "--device {auto,cpu} Where to run (default: auto)",
    ):
        assert part in short and part in whole
    assert "--help_all" in short and "--run_dir" not in short and "chosen" not in whole
    assert "--run_dir TEXT Where to write (default: unset)" in whole


def test_other_defaults_fill_only_what_was_not_given():
    parsed = parse("--num_envs", "8", defaults={"window": 3})
    assert parsed.configs["learning"] == Learning(num_envs=8, window=3)
    assert flags.preset(SECTIONS, "--quick") == {"num_envs": 8}
    parsed = parsed.with_defaults({"num_envs": 16, "device": "cpu"})
    assert parsed.configs["learning"].num_envs == 8 and parsed.configs["place"].device == "cpu"
    with pytest.raises(ValueError, match="num_envs must be"):
        parse().with_defaults({"num_envs": 0})


def test_further_flags_can_be_added_but_no_name_twice():
    parsed = parse("--more", "x", extra=lambda parser: parser.add_argument("--more"))
    assert parsed.extra.more == "x" and parsed.given == set()
    with pytest.raises(argparse.ArgumentError, match="run_dir"):
        parse(sections={"one": Place, "two": Place})


def test_an_answer_is_a_flag_and_flags_become_words_again():
    parsed = parse("--no-anneal_lr", "--run_dir=").answered("learning_rate", "-1e-3")
    assert parsed.words() == ["--learning_rate=-0.001", "--anneal_lr=False", "--run_dir="]
    assert parse(*parsed.words()) == parsed
    with pytest.raises(ValueError, match="num_envs must be a whole number, got 'two'"):
        parsed.answered("num_envs", "two")


def test_a_section_is_a_frozen_value_that_other_processes_can_have():
    changed = Learning(num_envs=3)
    assert pickle.loads(pickle.dumps(changed)) == changed == replace(Learning(), num_envs=3)
    with pytest.raises(AttributeError):
        changed.num_envs = 4
    with pytest.raises(ValueError, match=r"^num_envs must be auto or 2\.\..*, got 0$"):
        replace(changed, num_envs=0)


def test_what_files_hold_is_read_back_without_what_is_not_stored():
    place = Place(command="echo secret", chosen="cpu")
    run = Run(learning=Learning(num_envs=1), place=place)
    saved = json.loads(json.dumps(flags.saved_form(run)))
    assert saved["learning"]["num_envs"] == "auto"
    assert saved["place"] == {"run_dir": "", "device": "auto", "chosen": "cpu"}
    read = flags.read_sections(SECTIONS, saved)
    assert read == {"learning": run.learning, "place": Place(chosen="cpu")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_envs", value) for value in ("3", True, 3.0, 10**4000)),
        *(("learning_rate", math.nan), ("window", 2**63 + 1), ("run_dir", "\ud800")),
        *(("anneal_lr", 1), ("device", []), ("chosen", "gpu"), ("other", 1)),
    ],
)
def test_a_saved_value_is_never_bent_until_it_fits(name, value):
    heading = "learning" if hasattr(Learning, name) else "place"
    with pytest.raises(ValueError, match=f"does not fit this version: .*{name}") as raised:
        flags.read_sections(SECTIONS, {heading: {name: value}})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("saved", [None, {"learning": 3}, {"elsewhere": {}}])
def test_what_is_no_saved_form_is_refused(saved):
    with pytest.raises(ValueError, match="is no section of it"):
        flags.read_sections(SECTIONS, saved)
