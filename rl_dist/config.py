"""Command-line flags out of dataclasses: one per field, flat over all sections."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_dist.errors import CommandParser

T = TypeVar("T")
_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NO_TEXT = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")  # control characters, bytes that are no UTF-8
_LARGEST = 2**63  # of all numbers: more counts or measures nothing
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def flag(
    default: T,
    help_text: str,
    unit: str = "",
    choices: tuple[T, ...] = (),
    words: Mapping[str, T] | None = None,
    *,
    stored: bool = True,
) -> T:
    """A dataclass field that becomes a flag.

    Args:
        words: stand for some of its values.
        stored: False: no file holds its value, see `rl_dist.checkpoint.saved_config`.
    """
    metadata: dict[str, Any] = {"help": help_text, "unit": unit, "words": words or {}, "stored": stored}
    return dataclasses.field(default=default, metadata=metadata | ({"choices": choices} if choices else {}))


def recorded(default: T) -> T:
    """A field that is no flag: what the run itself found, kept in config.json."""
    return dataclasses.field(default=default, metadata={"recorded": True})


def is_flag(entry: dataclasses.Field[Any]) -> bool:
    """Whether a field of a config stands on the command line."""
    return not entry.metadata.get("recorded", False)


def is_stored(entry: dataclasses.Field[Any]) -> bool:
    """Whether files hold the value of a field."""
    return bool(entry.metadata.get("stored", True))


def check_types(cls: type[Any], values: Mapping[str, Any]) -> None:
    """Compare values of fields of a config with what the fields are for.

    Raises:
        ValueError: names the field: no such one, another type, no finite number, no text, or not among the choices.
    """
    entries, hints = {entry.name: entry for entry in dataclasses.fields(cls)}, typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in entries:
            raise ValueError(f"there is no {name!r:.80}")
        kind, optional = _kind(hints[name])
        if value is None and optional:
            continue
        fits = type(value) is kind or (kind is float and type(value) is int)
        if fits and kind in (int, float):
            fits = -_LARGEST <= value <= _LARGEST  # so no NaN
        if not fits or (kind is str and _NO_TEXT.search(value)):
            raise ValueError(f"{name} must be {_KINDS[kind]}, got {reprlib.repr(value)}")
        choices = entries[name].metadata.get("choices")
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {reprlib.repr(value)}")


@dataclass(frozen=True)
class ParsedFlags:
    """The configs built from a command line."""

    configs: dict[str, Any]  # one instance per section
    given: set[str]  # names of the fields that stood on the command line
    extra: argparse.Namespace  # values of the flags that `extra` added

    def with_defaults(self, values: Mapping[str, Any]) -> ParsedFlags:
        """The same with other defaults: `values` fill the fields that were not given.

        Raises:
            ValueError: an unknown name, or a value that a section refuses.
        """
        owners = {f.name: s for s, config in self.configs.items() for f in dataclasses.fields(config)}
        unknown = sorted(set(values) - set(owners))
        if unknown:
            raise ValueError(f"{unknown[0]} is no field of {', '.join(self.configs)}")
        configs = {}
        for section, config in self.configs.items():
            mine = {n: v for n, v in values.items() if owners[n] == section and n not in self.given}
            configs[section] = dataclasses.replace(config, **mine)
        return dataclasses.replace(self, configs=configs)

    def answered(self, name: str, text: str) -> ParsedFlags:
        """The same as if `--name text` had been given, too; no on/off flag.

        Raises:
            ValueError: the command line would be refused.
        """
        section, entry = self._field(name)
        kind, optional = _kind(typing.get_type_hints(type(self.configs[section]))[name])
        assert kind is not bool, f"{name} takes no value"
        try:
            value = _converter(kind, optional, entry.metadata.get("words", {}))(text)
        except ValueError:
            raise ValueError(f"{name} must be a{'n' * (kind is int)} {kind.__name__}, got {text!r}") from None
        choices = entry.metadata.get("choices")
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {text!r}")
        return self._replaced(section, name, value, self.given | {name})

    def forgotten(self, name: str) -> ParsedFlags:
        """The same as if `--name` had not been given."""
        section, entry = self._field(name)
        return self._replaced(section, name, entry.default, self.given - {name})

    def choices(self, name: str) -> tuple[Any, ...]:
        """The values that a flag can take; (): not a matter of choice."""
        return self._field(name)[1].metadata.get("choices") or ()

    def named(self, name: str) -> Any:
        """The value of a flag, if the command line has it; else None."""
        section, _ = self._field(name)
        return getattr(self.configs[section], name) if name in self.given else None

    def words(self) -> list[str]:
        """The flags given, as words of a command line."""
        found = []
        for config in self.configs.values():
            for entry in dataclasses.fields(config):
                if entry.name in self.given:
                    found += _words(entry.name, getattr(config, entry.name))
        return found

    def _field(self, name: str) -> tuple[str, dataclasses.Field[Any]]:
        """The section of a flag, and its field there."""
        return next(
            (section, entry)
            for section, config in self.configs.items()
            for entry in dataclasses.fields(config)
            if entry.name == name
        )

    def _replaced(self, section: str, name: str, value: Any, given: set[str]) -> ParsedFlags:
        config = dataclasses.replace(self.configs[section], **{name: value})
        return dataclasses.replace(self, configs=self.configs | {section: config}, given=given)


def parse_flags(
    sections: Mapping[str, type[Any]],
    argv: Sequence[str] | None = None,
    *,
    description: str,
    epilog: str = "",
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    prog: str | None = None,
) -> ParsedFlags:
    """Parse `argv` into one instance per section.

    Bad input prints one line and exits with 2.

    Args:
        sections: dataclass by heading. Fields are int, float, str or bool, optionally None;
            metadata: "help", "unit", "choices".
        argv: without the program's name; None is the process's own.
        extra: adds further flags to the parser, first in --help and returned in `.extra`.
        prog: the command's name in --help; by default the script's.
    """
    parser = CommandParser(
        prog=prog,
        usage="%(prog)s [--flag value ...]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if extra:
        extra(parser)
    owners = _add_fields(parser, sections)
    known = vars(_parse_known(parser, list(sys.argv[1:] if argv is None else argv)))
    configs = {}
    for section, cls in sections.items():
        values = {name: known.pop(name) for name in list(known) if owners.get(name) == section}
        known[f"given {section}"] = set(values)
        try:
            check_types(cls, values)
            configs[section] = cls(**values)
        except ValueError as error:
            parser.error(str(error))
    given: set[str] = set().union(*(known.pop(f"given {section}") for section in sections))
    return ParsedFlags(configs=configs, given=given, extra=argparse.Namespace(**known))


def _words(name: str, value: Any) -> list[str]:
    """One flag as words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = "none" if value is None else str(value)
    return [f"--{name}={text}"] if text.startswith("-") or not text else [f"--{name}", text]


def _add_fields(parser: argparse.ArgumentParser, sections: Mapping[str, type[Any]]) -> dict[str, str]:
    """Add one flag per field; returns the section of each field."""
    owners: dict[str, str] = {}
    for section, cls in sections.items():
        group = parser.add_argument_group(section)
        hints = typing.get_type_hints(cls)
        for entry in filter(is_flag, dataclasses.fields(cls)):
            assert entry.name not in owners, f"{entry.name} is in {owners[entry.name]} and in {section}"
            owners[entry.name] = section
            _add_field(group, entry, hints[entry.name])
    return owners


def _add_field(group: Any, entry: dataclasses.Field[Any], hint: Any) -> None:
    kind, optional = _kind(hint)
    options: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": _help(entry)}
    if kind is bool:
        names = [f"--{entry.name}", f"--no-{entry.name}"]
        group.add_argument(*names, action=_OnOff, nargs=0, **options)
        return
    choices = entry.metadata.get("choices")
    words = entry.metadata.get("words", {})
    metavar = "{" + ",".join(map(str, choices)) + "}" if choices else "|".join([kind.__name__.upper(), *words])
    convert = _converter(kind, optional, words)
    group.add_argument(f"--{entry.name}", type=convert, choices=choices, metavar=metavar, **options)


class _OnOff(argparse.Action):
    """`--name` is True, `--no-name` is False."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


def _kind(hint: Any) -> tuple[type, bool]:
    """The plain type of an annotation and whether None is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        plain = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        assert len(plain) == 1 and len(typing.get_args(hint)) == 2, f"no flag can be made of {hint}"
        return plain[0], True
    assert hint in (int, float, str, bool), f"no flag can be made of {hint}"
    return hint, False


def _help(entry: dataclasses.Field[Any]) -> str:
    assert entry.default is not dataclasses.MISSING, f"{entry.name} needs a default"
    words = {"None": "none", "": "unset", "True": "on", "False": "off"}
    shown = words.get(str(entry.default), str(entry.default))
    counted = entry.metadata.get("unit") and not isinstance(entry.default, str)
    unit = f" {entry.metadata['unit']}" if counted else ""
    return f"{entry.metadata.get('help', '')} (default: {shown}{unit})".strip().replace("%", "%%")


def _converter(kind: type, optional: bool, words: Mapping[str, Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text.lower() in words:
            return words[text.lower()]
        if optional and text.lower() in ("none", "off"):
            return None
        if kind is str:
            return text
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(text)
        if kind is float:
            return number
        if number != int(number):
            raise ValueError(text)
        return int(number) if "e" in text.lower() or "." in text else int(text)

    convert.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return convert


def _parse_known(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    options = {name[2:].replace("-", "_"): name for name in parser._option_string_actions if name[:2] == "--"}
    namespace, unknown = parser.parse_known_args(_canonical(argv, options))
    if unknown and unknown[0].startswith("-"):
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), options, n=1)
        hint = f" (did you mean {options[near[0]]}?)" if near else ", see --help"
        parser.error(f"unknown flag {name}{hint}")
    if unknown:
        parser.error(f"unexpected argument {unknown[0]!r}: values follow a flag, see --help")
    return namespace


def _canonical(argv: list[str], options: Mapping[str, str]) -> list[str]:
    """Dashes or underscores in names, negative numbers and `--flag=true` as argparse wants them."""
    tokens: list[str] = []
    for token in argv:
        name, equals, value = token.partition("=")
        option = options.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        on_off = option and f"--no-{option[2:]}" in options.values()
        if option and on_off and equals and value.lower() in _TRUE + _FALSE:
            option = option if value.lower() in _TRUE else f"--no-{option[2:]}"
            equals = value = ""
        if option:
            tokens.append(option + equals + value)
        elif _NUMBER.match(token) and tokens and tokens[-1] in options.values():
            tokens[-1] += "=" + token  # argparse takes -1e-3 for a flag
        else:
            tokens.append(token)
    return tokens


def saved_form(config: Any) -> dict[str, dict[str, Any]]:
    """What files hold of a config of sections: plain values by section and name."""
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return {
        name: {
            item.name: getattr(section, item.name) if is_stored(item) else getattr(section, item.name) != item.default
            for item in dataclasses.fields(section)
        }
        for name, section in sections.items()
    }


def read_sections(sections: Mapping[str, type[Any]], saved: Any) -> dict[str, Any]:
    """The sections of `saved_form`; what is not stored is at its default.

    Raises:
        ValueError: it is no such form, or holds a name or value that this version refuses; one line.
    """
    built = {}
    try:
        for name, values in saved.items() if isinstance(saved, dict) else [("", None)]:
            if not isinstance(values, dict) or name not in sections:
                raise ValueError(f"{name!r:.80} is no section of it")
            stored = {key: value for key, value in values.items() if key not in _not_stored(sections[name])}
            check_types(sections[name], stored)
            built[name] = sections[name](**stored)
    except ValueError as error:
        raise ValueError(f"the saved configuration does not fit this version: {error}") from None
    return built


def given_once(sections: Mapping[str, type[Any]], saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Flags that were given when it was saved, and are not stored."""
    return {item for name, values in saved.items() for item in _not_stored(sections[name]) if values.get(item)}


def _not_stored(section: type[Any]) -> set[str]:
    return {item.name for item in dataclasses.fields(section) if not is_stored(item)}
