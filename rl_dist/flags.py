"""Make flags from frozen pydantic dataclasses, with one line for every error.

    @configuration
    class Sizes:
        batch_size: int = Field(128, ge=1, le=10**7)
        '''Sequences per minibatch.'''

The string below a field is its help. A field without such a string is no flag: a run records its
value by itself. A field with `exclude=True` is not written to files.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from rl_dist.errors import CommandParser, UserError, did_you_mean

__all__ = ["Field", "Text", "configuration", "or_auto", "parse_flags"]

T = TypeVar("T")
# Text without control characters and surrogates (bytes of a command line that are not UTF-8).
Text = Annotated[str, StringConstraints(pattern="^[\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*$")]
_RULES = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
_PROBLEMS = {  # messages that are clearer than pydantic's, by its name of the error
    "string_pattern_mismatch": "must be text without control characters",
    "unexpected_keyword_argument": "is no setting",
}


def or_auto(value: int) -> BeforeValidator:
    """Let users write auto for this value of a whole number."""
    return BeforeValidator(lambda given: value if given == "auto" else given)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def configuration(cls: type[T]) -> type[T]:
    """Turn a class into a frozen dataclass that checks its values.

    A bad value raises a ValueError of one line, also in `dataclasses.replace`.
    """
    built: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
    checked_init = built.__init__

    @functools.wraps(checked_init)
    def init(self: Any, **values: Any) -> None:
        try:
            checked_init(self, **values)
        except ValidationError as error:
            raise _one_line(error) from None

    built.__init__ = init
    return built


def _one_line(error: ValidationError) -> ValueError:
    """Return the first error as one line with field, rule and value."""
    first = error.errors(include_url=False)[0]
    if "error" in first.get("ctx", {}):  # raised by __post_init__
        return first["ctx"]["error"]
    name = str(first["loc"][0])
    problem = _PROBLEMS.get(first["type"]) or first["msg"].replace("Input should", "must")
    return UserError(f"{name:.80} {problem}, got {reprlib.repr(first['input'])}")


def fields_of(section: Any) -> dict[str, FieldInfo]:
    """Return the fields of a section that are flags, by name."""
    fields = type(section).__pydantic_fields__.items()
    return {name: field for name, field in fields if field.description}


def changed(sections: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections with some values replaced, by the names of fields."""
    return {
        heading: dataclasses.replace(
            section, **{name: values[name] for name in values.keys() & vars(section).keys()}
        )
        for heading, section in sections.items()
    }


def allowed(field: FieldInfo) -> str:
    """Describe the values that a field may have."""
    sides = "ge", "le"
    limits = [getattr(m, side) for m in field.metadata for side in sides if hasattr(m, side)]
    kinds: dict[Any, str] = {bool: "on or off", int: "whole number", float: "number"}
    choices = typing.get_args(field.annotation)
    return ", ".join(choices) or "..".join(map(str, limits)) or kinds.get(field.annotation, "text")


def shown(value: Any) -> str:
    """Return a value as text for users."""
    return {"True": "on", "False": "off", "": "none"}.get(str(value), str(value))


@dataclass(frozen=True)
class ParsedFlags:
    """A parsed command line."""

    given: dict[str, str]  # text of the flags on the command line, without those of `extra`
    configs: dict[str, Any]  # sections with these values, by heading
    extra: argparse.Namespace  # values of the arguments that `extra` added


def parse_flags(
    sections: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    *,
    description: str,
    epilog: str = "",
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    prog: str | None = None,
    main: Set[str] = frozenset(),
) -> ParsedFlags:
    """Parse a command line; bad input prints one line and exits with code 2.

    Args:
        sections: configurations by heading; their values are the defaults.
        argv: words after the program's name; None: those of this process.
        description: first text of --help.
        epilog: last text of --help.
        extra: adds further arguments to the parser.
        prog: name of the command in --help; None: that of the script.
        main: flags that --help shows, while --help_all shows all; empty: --help shows all.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    usage = "%(prog)s [--flag value ...]"
    parser = CommandParser(prog=prog, usage=usage, description=description, epilog=epilog)
    if main:
        parser.add_argument("--help_all", action="help", help="show all flags, by section")
    if extra:
        extra(parser)
    shows_all = not main or bool({"--help_all", "--help-all"} & set(argv))
    flags: list[str] = []
    for heading, section in sections.items():
        group = parser.add_argument_group(heading)
        flags += fields_of(section)
        for name, field in fields_of(section).items():
            about = str(field.description).rstrip(".").replace("%", "%%")
            text = f"{about} (default: {shown(getattr(section, name))}; {allowed(field)})"
            _add_flag(group, name, field, text if shows_all or name in main else argparse.SUPPRESS)
    values = vars(_parse_known(parser, argv))
    given = {name: values.pop(name) for name in flags if name in values}
    given = {
        name: text if isinstance(text, str) else " ".join(text) for name, text in given.items()
    }
    try:
        configs = changed(sections, given)
    except ValueError as error:
        parser.error(str(error))
    return ParsedFlags(given, configs, argparse.Namespace(**values))


def _add_flag(group: Any, name: str, field: FieldInfo, text: str) -> None:
    """Add a flag to a group of the parser; its value stays text."""
    choices = typing.get_args(field.annotation)
    options: dict[str, Any] = {"metavar": "{" + ",".join(choices) + "}" if choices else "X"}
    if field.annotation is bool:  # --x is --x=true
        options = {"metavar": "true|false", "nargs": "?", "const": "true"}
    if field.annotation is int:
        options["type"] = _digits
    options |= typing.cast("dict[str, Any]", field.json_schema_extra or {})
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **options)


def _digits(text: str) -> str:
    """Return a whole number such as 1e6 in digits, and other text unchanged."""
    with suppress(ValueError):
        number = float(text)
        if number.is_integer() and not text.isdigit():
            return str(int(number))
    return text


def _parse_known(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")  # -1e-3 is no flag
    flags = parser._option_string_actions
    namespace, unknown = parser.parse_known_args([_canonical(word, flags) for word in argv])
    for word in unknown:
        name = word.split("=")[0]
        if not name.startswith("-"):
            parser.error(f"unexpected argument {word!r}: values follow a flag, see --help")
        parser.error(f"unknown flag {name}: {did_you_mean(name, flags) or 'see --help'}")
    return namespace


def _canonical(word: str, flags: Mapping[str, Any]) -> str:
    """Return a word with underscores in its flag's name; --no-x becomes --x=false."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    name = name[2:].replace("-", "_")
    if name.startswith("no_") and f"--{name[3:]}" in flags:
        return f"--{name[3:]}=false"
    return f"--{name}{equals}{value}"


def saved_form(config: Any) -> dict[str, dict[str, Any]]:
    """Return the values of a configuration that are written to files."""
    return {
        heading: {
            name: getattr(section, name)
            for name, field in type(section).__pydantic_fields__.items()
            if not field.exclude
        }
        for heading, section in vars(config).items()
    }


def read_sections(defaults: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """Return sections from what `saved_form` returned; missing values are defaults.

    Raises:
        ValueError: one line: it has another form, or a value that this version refuses.
    """
    sections = {}
    try:
        if not isinstance(saved, dict):
            raise ValueError("it has no section")
        for heading, values in saved.items():
            if not isinstance(values, dict) or heading not in defaults:
                raise ValueError(f"it has no section {heading!r:.80}")
            cls = type(defaults[heading])
            excluded = {name for name, field in cls.__pydantic_fields__.items() if field.exclude}
            sections[heading] = cls(**{n: v for n, v in values.items() if n not in excluded})
    except ValueError as error:
        raise ValueError(f"the saved configuration does not fit this version: {error}") from None
    return sections
