"""Declared fields: configurations, and the command-line flags made of them.

    @configuration
    class Sizes:
        batch_size: int = setting(128, "sequences", within=(1, 10**7))
        '''Sequences per minibatch.'''

Default, unit, range, choices and help of a field stand there and nowhere else. pydantic refuses
other types, numbers out of range or not finite, and unknown names; here its errors become one line.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import reprlib
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import ConfigDict, StringConstraints, ValidationError

from rl_dist.errors import CommandParser, UserError, report_to_caller

T = TypeVar("T")
# no control characters, and no bytes that are not UTF-8
Text = Annotated[str, StringConstraints(pattern="^[\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*$")]
LARGEST = 2**63  # of all numbers: more counts or measures nothing
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_KINDS = {  # by the first word of pydantic's name for the error
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "text",
}
_ON_OFF = dict.fromkeys(("true", "yes", "on", "1"), True)
_ON_OFF |= dict.fromkeys(("false", "no", "off", "0"), False)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All that is known of a field, for checks, flags, dialogues and documents."""

    default: Any
    unit: str = ""
    # the least and the largest value; None: any
    within: tuple[float | None, float | None] = (None, None)
    # words of a command line that stand for some of its values
    words: Mapping[str, Any] = field(default_factory=dict)
    # other defaults, by what sets them, such as "--quick"
    presets: Mapping[str, Any] = field(default_factory=dict)
    derived: str = ""  # what the default comes to, where it stands for a derived value
    main: bool = False  # --help shows it; --help_all shows all
    several: bool = False  # words may follow, which become one text
    stored: bool = True  # or no file holds it
    is_flag: bool = True
    # known once the class exists
    owner: type = object
    name: str = ""
    kind: type = str  # bool, int, float or str
    choices: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """The docstring below the field."""
        return _docstrings(self.owner).get(self.name, "")

    @property
    def range(self) -> str:
        """The least and the largest value, where there are any."""
        least, largest = self.within
        if least is not None and least in self.words.values():  # the word means that number
            least += 1
        if largest is not None:
            return " or ".join([*self.words, f"{least}..{largest}"])
        return "" if least is None else f"at least {least}"

    def shown(self, value: Any) -> str:
        """Return a value as users read it."""
        if self.derived and value == self.default:
            return self.derived
        text = {"True": "on", "False": "off", "": "unset"}.get(str(value), str(value))
        return f"{text} {self.unit}" if self.unit and self.kind is not str else text

    def help_line(self, default: Any) -> str:
        """Return the help of the flag, with its default, range and presets."""
        notes = [f"default: {self.shown(default)}"]
        notes += [f"{name}: {self.shown(value)}" for name, value in self.presets.items()]
        notes += [f"range: {self.range}"] if self.range else []
        return f"{self.help} ({'; '.join(notes)})"

    def value_of(self, text: str) -> Any:
        """Return the value of a word of a command line; what is no value stays as it is.

        Raises:
            UserError: a number that only a word of this flag stands for.
        """
        words = {**_ON_OFF, **self.words} if self.kind is bool else self.words
        if text.lower() in words:
            return words[text.lower()]
        if self.kind in (int, float):
            number: Any = text
            with suppress(ValueError):
                number = float(text)
                if self.kind is int and number.is_integer():
                    number = int(number)
            with suppress(ValueError):  # more digits than a float has
                number = int(text)
            if number in self.words.values():
                raise UserError(f"{self.name} must be {self.range}, got {text}")
            return number
        return text

    def word_of(self, value: Any) -> Any:
        """Return the word that stands for a value, else the value."""
        return next((word for word, meant in self.words.items() if meant == value), value)

    def add_to(self, group: Any, help_line: str) -> None:
        """Add the flag to a parser, which collects its value as text."""
        kind = "TEXT" if self.kind is str else self.kind.__name__.upper()
        options: dict[str, Any] = {"metavar": "|".join([kind, *self.words])}
        if self.choices:
            options = {"metavar": "{" + ",".join(self.choices) + "}"}
        elif self.kind is bool:  # --x is --x=true
            options = {"metavar": "true|false", "nargs": "?", "const": "true"}
        elif self.several:
            options |= {"nargs": "+"}
        text = help_line.replace("%", "%%")
        group.add_argument(f"--{self.name}", default=argparse.SUPPRESS, help=text, **options)


def setting(default: T, unit: str = "", **options: Any) -> T:
    """Return a field that becomes a flag; options: see `Declaration`."""
    declared = Declaration(default=default, unit=unit, **options)
    limits: dict[str, float] = {}
    if type(default) in (int, float):
        least, largest = declared.within
        limits["ge"] = -LARGEST if least is None else least
        limits["le"] = LARGEST if largest is None else largest
    return dataclasses.field(default=default, metadata={"declared": declared, **limits})


def recorded(default: T) -> T:
    """Return a field that is no flag: config.json keeps what a run itself found."""
    declared = Declaration(default=default, is_flag=False)
    return dataclasses.field(default=default, metadata={"declared": declared})


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def configuration(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose values are checked.

    A value that does not fit raises a ValueError of one line, also with `dataclasses.replace`.
    """
    built: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
    checked_init = built.__init__

    @functools.wraps(checked_init)
    def init(self: Any, **values: Any) -> None:
        try:
            checked_init(self, **values)
        except ValidationError as error:
            raise _one_line(built, error) from None

    built.__init__ = init
    return built


def _one_line(cls: type[Any], error: ValidationError) -> ValueError:
    """Return the first of the errors: what the field must be, and what it got."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if "error" in context:  # raised by __post_init__
        return context["error"]
    name = str(first["loc"][0])
    if first["type"] == "unexpected_keyword_argument":
        return UserError(f"there is no {name!r:.80}")
    expected = _KINDS.get(first["type"].partition("_")[0], first["msg"])
    if first["type"] == "literal_error":
        expected = "one of " + context["expected"].replace("'", "").replace(" or ", ", ")
    elif context.keys() & {"ge", "le"}:
        declared = cls.__dataclass_fields__[name].metadata["declared"]
        expected = declared.range or f"a number up to {LARGEST:g}"
    return UserError(f"{name} must be {expected}, got {reprlib.repr(first['input'])}")


def declarations(cls: Any) -> Mapping[str, Declaration]:
    """Return what the fields of a section declare, by name."""
    return _declarations(cls)


@functools.cache
def _declarations(cls: Any) -> Mapping[str, Declaration]:
    hints = typing.get_type_hints(cls)
    return {
        item.name: dataclasses.replace(
            item.metadata["declared"],
            owner=cls,
            name=item.name,
            kind=hints[item.name] if hints[item.name] in (bool, int, float) else str,
            choices=typing.get_args(hints[item.name]),
        )
        for item in dataclasses.fields(cls)
    }


@functools.cache
def _docstrings(cls: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a class; reading the source takes a while."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        ast.unparse(item.target): " ".join(ast.literal_eval(below.value).split()).rstrip(".")
        for item, below in itertools.pairwise(tree.body[0].body)
        if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def preset(sections: Mapping[str, type[Any]], name: str) -> dict[str, Any]:
    """Return the defaults of a preset, by field."""
    items = [item for cls in sections.values() for item in declarations(cls).values()]
    return {item.name: item.presets[name] for item in items if name in item.presets}


@dataclass(frozen=True)
class ParsedFlags:
    """The configs built from a command line."""

    configs: dict[str, Any]  # one instance per section
    given: set[str]  # names of the fields that stood on the command line
    extra: argparse.Namespace  # values of the flags that `extra` added

    def with_defaults(self, values: Mapping[str, Any]) -> ParsedFlags:
        """Return the same with other defaults, of the fields that were not given."""
        return self._changed({n: v for n, v in values.items() if n not in self.given}, self.given)

    def _changed(self, values: Mapping[str, Any], given: set[str]) -> ParsedFlags:
        configs = {}
        for heading, config in self.configs.items():
            own = values.keys() & declarations(type(config)).keys()
            configs[heading] = dataclasses.replace(config, **{name: values[name] for name in own})
        return dataclasses.replace(self, configs=configs, given=given)

    def answered(self, name: str, text: str) -> ParsedFlags:
        """Return the same as if `--name text` had been given; may raise ValueError."""
        return self._changed({name: self.declaration(name).value_of(text)}, self.given | {name})

    def declaration(self, name: str) -> Declaration:
        """Return what the field of a flag declares."""
        owner = next(config for config in self.configs.values() if hasattr(config, name))
        return declarations(type(owner))[name]

    def words(self) -> list[str]:
        """Return the flags given, as words of a command line."""
        values = {n: v for config in self.configs.values() for n, v in vars(config).items()}
        return [
            f"--{name}={self.declaration(name).word_of(value)}"
            for name, value in values.items()
            if name in self.given
        ]


def parse_flags(
    sections: Mapping[str, type[Any]],
    argv: Sequence[str] | None = None,
    *,
    description: str,
    epilog: str = "",
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    prog: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    other_names: Mapping[str, str] | None = None,
) -> ParsedFlags:
    """Parse `argv` into one instance per section.

    Bad input prints one line and exits with 2.

    Args:
        argv: without the program's name; None is the process's own.
        extra: adds further flags to the parser, first in --help and returned in `.extra`.
        prog: the command's name in --help; by default the script's.
        defaults: of this command, instead of those declared.
        other_names: what other programs call some of the flags, for "did you mean".
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    defaults = defaults or {}
    parser = CommandParser(
        prog=prog,
        usage="%(prog)s [--flag value ...]",
        description=description,
        epilog=epilog,
    )
    parser.add_argument("--help_all", action="help", help="show the other flags, too, by section")
    if extra:
        extra(parser)
    asked = {word.replace("-", "_") for word in argv} & {"_h", "__help", "__help_all"}
    for heading, cls in sections.items():
        group = parser.add_argument_group(heading)
        for item in filter(lambda item: item.is_flag, declarations(cls).values()):
            shown = "__help_all" in asked or (asked and item.main)
            default = defaults.get(item.name, item.default)
            item.add_to(group, item.help_line(default) if shown else argparse.SUPPRESS)
    known = vars(_parse_known(parser, argv, other_names or {}))
    configs: dict[str, Any] = {}
    given: set[str] = set()
    for heading, cls in sections.items():
        own = declarations(cls)
        texts = {name: known.pop(name) for name in own if name in known}
        values = {name: value for name, value in defaults.items() if name in own}
        try:
            for name, text in texts.items():
                values[name] = own[name].value_of(" ".join(text) if own[name].several else text)
            configs[heading] = cls(**values)
        except ValueError as error:
            parser.error(str(error))
        given |= texts.keys()
    return ParsedFlags(configs=configs, given=given, extra=argparse.Namespace(**known))


def _parse_known(
    parser: CommandParser, argv: list[str], other_names: Mapping[str, str]
) -> argparse.Namespace:
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")  # -1e-3 is no flag
    flags = parser._option_string_actions
    namespace, unknown = parser.parse_known_args([_canonical(word, flags) for word in argv])
    for word in unknown:
        name = word.split("=")[0]
        if not name.startswith("-"):
            parser.error(f"unexpected argument {word!r}: values follow a flag, see --help")
        meant = other_names.get(name.lstrip("-").lower(), "")
        near = [f"--{meant}"] if meant else difflib.get_close_matches(name, flags, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ", see --help_all"
        report_to_caller(unknown_flag=name.lstrip("-"))
        parser.error(f"unknown flag {name}{hint}")
    return namespace


def _canonical(word: str, flags: Mapping[str, Any]) -> str:
    """Return a word with underscores in the name of its flag; --no-x is --x=false."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    name = name[2:].replace("-", "_")
    if name.startswith("no_") and f"--{name[3:]}" in flags:
        return f"--{name[3:]}=false"
    return f"--{name}{equals}{value}"


def saved_form(config: Any) -> dict[str, dict[str, Any]]:
    """Return what files hold of a configuration: values by section and name."""
    return {
        heading: {
            name: item.word_of(getattr(values, name))
            for name, item in declarations(type(values)).items()
            if item.stored
        }
        for heading, values in vars(config).items()
    }


def read_sections(sections: Mapping[str, type[Any]], saved: Any) -> dict[str, Any]:
    """Return the sections of `saved_form`; what is not stored is at its default.

    Raises:
        ValueError: it is no such form, or holds what this version refuses; one line.
    """
    built = {}
    try:
        for heading, values in saved.items() if isinstance(saved, dict) else [("", None)]:
            if not isinstance(values, dict) or heading not in sections:
                raise ValueError(f"{heading!r:.80} is no section of it")
            values = dict(values)
            for name, item in declarations(sections[heading]).items():
                if not item.stored:
                    values.pop(name, None)
                elif isinstance(values.get(name), str):
                    values[name] = item.words.get(values[name], values[name])
            built[heading] = sections[heading](**values)
    except ValueError as error:
        raise ValueError(f"the saved configuration does not fit this version: {error}") from None
    return built
