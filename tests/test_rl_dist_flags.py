"""Test that flags, files and arguments yield valid settings or a one-line error."""

import json
import math
import pickle
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import pytest

from rl_dist import flags
from rl_dist.flags import Field, Text, configuration, or_auto


@configuration
class Learning:
    learning_rate: float = Field(3e-4, ge=-1, le=10)
    """Learning rate before decay, 100 %."""
    num_envs: Annotated[int, or_auto(1)] = Field(64, ge=1, le=2**62 + 1)
    """Environments
    of all ranks."""
    window: int = 0
    """Number of steps."""
    anneal_lr: bool = True
    """Let the learning rate fall."""

    def __post_init__(self):
        if self.window > self.num_envs:
            raise ValueError(f"window {self.window} must not exceed num_envs {self.num_envs}")


@configuration
class Place:
    run_dir: Text = Field("", json_schema_extra={"nargs": "+"})
    """Directory for output."""
    device: Literal["auto", "cpu"] = "auto"
    """Device to use."""
    command: Text = Field("", exclude=True)
    """Function to call."""
    chosen: Literal["auto", "cpu", ""] = ""


@dataclass
class Run:
    learning: Learning = field(default_factory=Learning)
    place: Place = field(default_factory=Place)


SECTIONS = vars(Run())


def parse(*argv, sections=SECTIONS, **options):
    return flags.parse_flags(sections, argv, description="", epilog="examples", **options)


@pytest.mark.parametrize(
    "argv, values",
    [
        ([], {}),
        (["--num_envs", "64"], {"num_envs": 64}),  # the default, but it counts as given
        (["--num-envs", "8", "--learning_rate=-1e-3"], {"num_envs": 8, "learning_rate": -1e-3}),
        (["--num_envs", "auto"], {"num_envs": 1}),
        (["--no_anneal-lr"], {"anneal_lr": False}),
        (["--anneal_lr", "--window=0"], {"anneal_lr": True, "window": 0}),
        (["--run-dir", "a-b/--c", "d"], {"run_dir": "a-b/--c d"}),
        (["--num_envs=1e5", "--window", "2.0E+1"], {"num_envs": 100_000, "window": 20}),
        (["--run_dir", "1e5"], {"run_dir": "1e5"}),  # this field is text
    ],
)
def test_flags_set_fields_of_their_section_and_parsed_flags_can_be_parsed_again(argv, values):
    parsed = parse(*argv)
    assert parsed.configs == flags.changed(SECTIONS, values) and parsed.given.keys() == set(values)
    held = {k: v for section in parsed.configs.values() for k, v in vars(section).items()}
    assert {name: type(held[name]) for name in values} == {k: type(v) for k, v in values.items()}
    assert parse(*(f"--{name}={text}" for name, text in parsed.given.items())) == parsed


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--num_envs", "-3"], ["num_envs", "equal to 1", "-3"]),
        (["--learning_rate", "nan"], ["learning_rate", "finite number", "nan"]),
        (["--num_envs", "1.5e0"], ["num_envs", "integer", "1.5"]),
        (["--device", "tpu"], ["device", "'auto' or 'cpu'", "tpu"]),
        (["--run_dir", "a\x1b[2J"], ["run_dir", "text"]),
        (["--window", "65"], ["window 65 must not exceed num_envs 64"]),
        (["--anneal_lr=perhaps"], ["anneal_lr", "boolean", "perhaps"]),
        (["--num_env", "8"], ["unknown flag --num_env", "did you mean --num_envs?"]),
        (["--chosen", "cpu"], ["unknown flag --chosen"]),
    ],
)
def test_bad_flags_are_one_line(capsys, argv, parts):
    with pytest.raises(SystemExit, match="2"):
        parse(*argv)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in parts)


def test_help_shows_the_main_flags_and_help_all_the_rest(capsys):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse(flag, main={"num_envs"})
    short, whole = " ".join(capsys.readouterr().out.split()).split("examples")[:2]
    assert f"Environments of all ranks (default: 64; 1..{2**62 + 1})" in short
    assert "--run_dir" not in short and "--chosen" not in whole
    assert "fall (default: on" in whole and "output (default: none" in whole


def test_a_section_is_immutable_and_can_be_pickled():
    other = Learning(num_envs=3)
    assert pickle.loads(pickle.dumps(other)) == other == replace(Learning(), num_envs=3)
    with pytest.raises(AttributeError):
        other.num_envs = 4
    for change in (lambda: replace(other, num_envs=0), lambda: Learning(num_envs=0)):
        with pytest.raises(ValueError, match=r"^num_envs must be .* 1, got 0$"):
            change()


def test_saved_settings_are_read_back_without_fields_that_are_not_saved():
    run = Run(Learning(num_envs=1), Place(command="echo secret", chosen="cpu"))
    saved = json.loads(json.dumps(flags.saved_form(run)))
    assert "secret" not in str(saved)
    saved["place"]["command"] = "from elsewhere"
    read = flags.read_sections(SECTIONS, saved)
    assert read == {"learning": run.learning, "place": Place(chosen="cpu")}


@pytest.mark.parametrize(
    "saved, problem",
    [
        *(({"learning": {"num_envs": value}}, "num_envs") for value in ("x", 0, 10**4000)),
        ({"learning": {"learning_rate": math.nan}}, "learning_rate"),
        ({"learning": {"other": 1}}, "other"),
        ({"place": {"run_dir": "\ud800"}}, "run_dir"),
        ({"learning": 3}, ""),
        ({"elsewhere": {}}, "elsewhere"),
    ],
)
def test_damaged_saved_settings_are_a_one_line_error(saved, problem):
    with pytest.raises(ValueError, match=f"^[^\n]*does not fit this version[^\n]*{problem}[^\n]*$"):
        flags.read_sections(SECTIONS, saved)
