"""Turn frozen pydantic dataclasses into command-line flags with one-line errors.

    @configuration
    class Sizes:
        batch_size: int = Field(128, ge=1, le=10**7)
        '''Sequences per minibatch.'''

The string below a field is the help text of its flag. A field without such a string has no flag:
the program itself sets the field, to record a fact about the run. A field with `exclude=True` is
not written to files.
"""

import argparse
import dataclasses
import functools
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
)
from pydantic import Field as Field  # other modules import it from here
from pydantic.fields import FieldInfo

from rl_dist.errors import CommandParser, UserError, did_you_mean, one_line
from rl_dist.files import absolute

T = TypeVar("T")
# Text without control characters and surrogates. In a command-line argument, Python replaces
# bytes that are not UTF-8 with surrogates.
Text = Annotated[str, StringConstraints(pattern="^[\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*$")]
_RULES = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def or_auto(value: int) -> BeforeValidator:
    """Return a validator that replaces the text "auto" with `value`."""
    return BeforeValidator(lambda raw: value if raw == "auto" else raw)


def absolute_path(*words: str) -> AfterValidator:
    """Return a validator that makes a path absolute; `words` and "" stay unchanged.

    The path becomes absolute when flags are parsed, because an environment may later change the
    current directory.
    """
    return AfterValidator(lambda text: text if text in ("", *words) else str(absolute(text)))


PathText = Annotated[Text, absolute_path()]


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def configuration(cls: type[T]) -> type[T]:
    """Turn a class into a frozen dataclass that checks its values.

    An invalid value raises a ValueError with a one-line message, also in `dataclasses.replace`.
    """
    built: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
    checked_init = built.__init__

    @functools.wraps(checked_init)
    def init(self: Any, **values: Any) -> None:
        for name, field in built.__pydantic_fields__.items():
            number = re.fullmatch(r"\d*\.?\d+[eE]\+?\d+", str(values.get(name)))
            if field.annotation is int and number:
                values[name] = float(number[0])  # 1e5, for example; pydantic accepts whole floats
        try:
            checked_init(self, **values)
        except ValidationError as error:
            raise _one_line(error) from None

    built.__init__ = init
    return built


def _one_line(error: ValidationError) -> ValueError:
    """Describe pydantic's first error on one line: the field, the rule and the value."""
    first = error.errors(include_url=False)[0]
    if "error" in first.get("ctx", {}):  # an error raised by __post_init__
        return first["ctx"]["error"]
    name = str(first["loc"][0])
    problem = first["msg"].replace("Input should", "must")
    if first["type"] == "string_pattern_mismatch":
        problem = "must be text without control characters"
    return UserError(f"{name:.80} {problem}, got {reprlib.repr(first['input'])}")


def fields_of(section: Any) -> dict[str, FieldInfo]:
    """Return the fields of a section that have a flag, as name -> field."""
    fields = type(section).__pydantic_fields__.items()
    return {name: field for name, field in fields if field.description}


def changed(sections: Mapping[str, Any], values: Mapping[str, object]) -> dict[str, Any]:
    """Return copies of the sections in which the fields named in `values` are changed."""
    return {
        heading: dataclasses.replace(
            section, **{name: values[name] for name in values.keys() & vars(section).keys()}
        )
        for heading, section in sections.items()
    }


def allowed(field: FieldInfo) -> str:
    """Describe the values that a field accepts."""
    bounds = "ge", "le"
    limits = [
        getattr(constraint, side)
        for constraint in field.metadata
        for side in bounds
        if hasattr(constraint, side)
    ]
    choices = ["on or off"] if field.annotation is bool else typing.get_args(field.annotation)
    return ", ".join(choices) or "..".join(map(str, limits)) or "text"


def shown(value: object) -> str:
    """Format a value for users, for example True as on."""
    return {"True": "on", "False": "off", "": "none"}.get(str(value), str(value))


@dataclass(frozen=True)
class ParsedFlags:
    """The result of parsing a command line."""

    given: dict[str, str]  # name of each flag on the command line -> its value as text
    configs: dict[str, Any]  # sections with the parsed values, by heading
    extra: argparse.Namespace  # values of the arguments that function `extra` added


def parse_flags(
    sections: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    *,
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    main: Set[str] = frozenset(),
    **about: Any,
) -> ParsedFlags:
    """Parse a command line; on an error, print one line and exit with code 2.

    Args:
        sections: configurations by heading; they hold the default values.
        argv: arguments after the program's name; None: the arguments of this process.
        extra: function that adds more arguments to the parser.
        main: flags that --help shows, while --help_all shows all flags. If empty, --help shows all
            flags.
        about: prog, description and epilog of the `argparse.ArgumentParser`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(usage="%(prog)s [--flag value ...]", **about)
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
            meaning = str(field.description).rstrip(".").replace("%", "%%")
            text = f"{meaning} (default: {shown(getattr(section, name))}; {allowed(field)})"
            options: Any = field.json_schema_extra or {}
            if field.annotation is bool:  # --x alone means --x=true
                options = {"nargs": "?", "const": "true"}
            group.add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,  # omit a flag that is not on the command line
                help=text if shows_all or name in main else argparse.SUPPRESS,
                metavar="X",
                **options,
            )
    values = vars(_parse_known(parser, argv))
    given = {
        name: text if isinstance(text := values.pop(name), str) else " ".join(text)
        for name in flags
        if name in values
    }  # the values of a flag with several values are joined to one text
    try:
        configs = changed(sections, given)
    except ValueError as error:
        parser.error(str(error))
    return ParsedFlags(given, configs, argparse.Namespace(**values))


def _parse_known(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command line; on an unknown flag, print similar flags and exit."""
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")  # -1e-3 is no flag
    flags = parser._option_string_actions
    namespace, unknown = parser.parse_known_args([_canonical(word, flags) for word in argv])
    if unknown:
        name = unknown[0].split("=")[0]
        parser.error(f"unknown flag {name}: {did_you_mean(name, flags) or 'see --help'}")
    return namespace


def _canonical(word: str, flags: Mapping[str, object]) -> str:
    """Replace hyphens in a flag's name by underscores, and --no-x by --x=false."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    name = name[2:].replace("-", "_")
    if name.startswith("no_") and f"--{name[3:]}" in flags:
        return f"--{name[3:]}=false"
    return f"--{name}{equals}{value}"


def saved_form(config: Any) -> dict[str, dict[str, Any]]:
    """Return a configuration's values by section and name, to be written to a file."""
    return {
        heading: pydantic.TypeAdapter(type(section)).dump_python(section)
        for heading, section in vars(config).items()
    }


def read_sections(defaults: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """Rebuild sections from the result of `saved_form`; missing values get defaults.

    Raises:
        ValueError: `saved` has a different structure, or contains a value that this version does
            not accept. The message is one line.
    """
    sections = {}
    try:
        for heading, values in saved.items():
            cls = type(defaults[heading])
            excluded = {name for name, field in cls.__pydantic_fields__.items() if field.exclude}
            sections[heading] = cls(**{n: v for n, v in values.items() if n not in excluded})
    except (ValueError, LookupError, AttributeError) as error:  # `saved` does not fit
        problem = "the saved configuration does not fit this version"
        raise ValueError(f"{problem}: {one_line(error, named=False)}") from None
    return sections
