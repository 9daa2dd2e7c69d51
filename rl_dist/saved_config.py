"""A configuration as files hold it: without secrets, and read as a stranger's.

Of a flag that is not stored (`flag(..., stored=False)`), such as a command to run, files hold only whether it was
given; what an older file holds in its place is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_dist.flags import check_types, is_stored


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
