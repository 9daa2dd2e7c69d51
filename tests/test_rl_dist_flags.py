"""Flags out of dataclasses: what is typed is what the config holds, or one clear line."""

from dataclasses import dataclass, field

import pytest

from rl_dist.config import flag, parse_flags


@dataclass(frozen=True, kw_only=True)
class Learning:
    learning_rate: float = field(default=3e-4, metadata={"help": "step size at 100 %", "unit": "1"})
    target_kl: float | None = field(default=None, metadata={"help": "stop above this"})
    num_envs: int = field(default=64, metadata={"help": "environments", "unit": "environments"})
    anneal_lr: bool = field(default=True, metadata={"help": "let the step size fall"})

    def __post_init__(self):
        if self.num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {self.num_envs}")


@dataclass(frozen=True, kw_only=True)
class Place:
    run_dir: str = field(default="", metadata={"help": "where to write"})
    device: str = field(default="auto", metadata={"help": "where to run", "choices": ("auto", "cpu")})


def parse(*argv, sections=None, **options):
    sections = sections or {"learning": Learning, "place": Place}
    return parse_flags(sections, argv, description="Trains.", epilog="examples:\n  train --quick", **options)


def fails(capsys, *argv):
    with pytest.raises(SystemExit) as leaving:
        parse(*argv)
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_without_flags_everything_is_at_its_default():
    parsed = parse()
    assert parsed.configs == {"learning": Learning(), "place": Place()}
    assert parsed.given == set()


def test_values_go_to_their_section_and_type_and_are_remembered_as_given():
    parsed = parse("--num_envs", "8", "--learning_rate=1e-3", "--target_kl", "0.02", "--run_dir", "a-b/--c")
    assert parsed.configs["learning"] == Learning(num_envs=8, learning_rate=1e-3, target_kl=0.02)
    assert parsed.configs["place"] == Place(run_dir="a-b/--c")
    assert parsed.given == {"num_envs", "learning_rate", "target_kl", "run_dir"}


def test_a_value_equal_to_the_default_counts_as_given():
    assert parse("--num_envs", "64").given == {"num_envs"}


def test_a_word_stands_for_a_value_beside_numbers(capsys):
    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        batch_size: int = flag(128, "slots", words={"auto": 0})

    values = [parse(f"--batch_size={text}", sections={"sizes": Sizes}) for text in ("auto", "AUTO", "0", "64")]
    assert [parsed.configs["sizes"].batch_size for parsed in values] == [0, 0, 0, 64]
    assert values[0].given == {"batch_size"}
    with pytest.raises(SystemExit):
        parse("--batch_size", "largest", sections={"sizes": Sizes})
    assert "invalid int value: 'largest'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--help", sections={"sizes": Sizes})
    assert "--batch_size INT|auto" in capsys.readouterr().out


def test_dashes_and_underscores_are_the_same():
    assert parse("--num-envs=8", "--run-dir", "x").configs == parse("--num_envs", "8", "--run_dir=x").configs


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--anneal_lr", True),
        ("--no-anneal_lr", False),
        ("--no-anneal-lr", False),
        ("--no_anneal_lr", False),
        ("--anneal_lr=false", False),
        ("--anneal-lr=true", True),
    ],
)
def test_switches_are_turned_on_and_off(flag, value):
    parsed = parse(flag)
    assert parsed.configs["learning"].anneal_lr is value
    assert parsed.given == {"anneal_lr"}


def test_numbers_may_be_written_in_any_usual_form():
    learning = parse("--num_envs", "1e3", "--learning_rate", "-1e-3", "--target_kl", "none").configs["learning"]
    assert (learning.num_envs, learning.learning_rate, learning.target_kl) == (1000, -1e-3, None)
    assert parse("--num_envs", str(2**62 + 1)).configs["learning"].num_envs == 2**62 + 1


def test_an_unknown_flag_is_one_line_with_the_nearest_name(capsys):
    assert fails(capsys, "--num_env", "8") == "error: unknown flag --num_env (did you mean --num_envs?)\n"
    assert "did you mean --learning_rate?" in fails(capsys, "--learning-rat=1")
    assert fails(capsys, "--zzz") == "error: unknown flag --zzz, see --help\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_envs", "many"], "num_envs: invalid int value: 'many'"),
        (["--num_envs", "1.5"], "invalid int value"),
        (["--learning_rate", "nan"], "invalid float value"),
        (["--num_envs"], "expected one argument"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--num_envs", "-3"], "num_envs must be at least 1, got -3"),
        (["8"], "unexpected argument '8'"),
    ],
)
def test_bad_values_are_one_line(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_help_teaches_types_defaults_units_sections_and_examples(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert leaving.value.code == 0
    for part in (
        "learning:",
        "place:",
        "--learning_rate FLOAT",
        "step size at 100 % (default: 0.0003 1)",
        "environments (default: 64 environments)",
        "--anneal_lr, --no-anneal_lr let the step size fall (default: on)",
        "--device {auto,cpu} where to run (default: auto)",
        "stop above this (default: none)",
        "examples: train --quick",
    ):
        assert part in shown


def test_further_flags_can_be_added_by_hand():
    parsed = parse("--preset", "paper", extra=lambda parser: parser.add_argument("--preset", default=""))
    assert parsed.extra.preset == "paper"
    assert parsed.given == set()


def test_other_defaults_fill_only_what_was_not_given():
    parsed = parse("--num_envs", "8").with_defaults({"num_envs": 16, "target_kl": 0.1, "device": "cpu"})
    assert parsed.configs == {"learning": Learning(num_envs=8, target_kl=0.1), "place": Place(device="cpu")}
    with pytest.raises(ValueError, match="nonsense is no field"):
        parsed.with_defaults({"nonsense": 1})
    with pytest.raises(ValueError, match="num_envs must be"):
        parse().with_defaults({"num_envs": 0})


def test_one_name_in_two_sections_is_a_bug():
    with pytest.raises(AssertionError, match="run_dir"):
        parse(sections={"one": Place, "two": Place})
