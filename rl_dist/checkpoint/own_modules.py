"""Modules of the user's own that a run may name: finding and trusting them.

A run directory may come from anybody. It never runs what it brings along, and names no module to
import but those that the command line names as well, or that the user's own run names.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_dist.errors import (
    FOREIGN_ERRORS,
    UserError,
    did_you_mean,
    is_here_on_path,
    no_module,
    one_line,
)
from rl_dist.files import plain_file, read_open


def import_from_here(*named: str) -> None:
    """Let the modules of any `module:name` among these lie in the current directory.

    It comes last on the path, where a script has its own folder instead; ranks inherit the path.
    """
    if any(":" in value for value in named) and not is_here_on_path():
        sys.path.append(str(Path.cwd()))


def import_own(field: str, value: str) -> Any:
    """Return the class or function that `module:name` names.

    Raises:
        UserError: there is no such module, it raises as it is imported, or has no such function.
    """
    module, _, name = value.partition(":")
    if not module or not name:
        raise UserError(f"{field} {value!r} must be module:name")
    try:
        found = importlib.import_module(module)
    except FOREIGN_ERRORS as error:
        why = no_module(module, error) or f"its module raised {one_line(error)}"
        raise UserError(f"{field} {value!r}: {why}") from error
    own = getattr(found, name, None)
    if not callable(own):
        fix = did_you_mean(name, vars(found)) or "check the name"
        where = getattr(found, "__file__", None) or "a folder"
        raise UserError(f"{field} {value!r}: {where} has no function or class {name}: {fix}")
    return own


def module_files(names: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files behind each `module:name`, by module; imports nothing."""
    modules = {module for name in names if (module := name.rpartition(":")[0])}
    return {module: [*filter(Path.is_file, map(Path, _places(module)))] for module in modules}


def check_module(env: str, kwargs: str, run_dir: Path, named: str | None) -> None:
    """Refuse an environment of a run before its module is imported; see `_check`."""
    _check("env", env, run_dir, named, "task", {"env": env, "env_kwargs": kwargs})


def check_core(core: str, run_dir: Path, named: str | None) -> None:
    """Refuse a policy's core of a run before its module is imported; see `_check`."""
    if core:
        _check("core", core, run_dir, named, "policy", {"core": core})


def check_callback(callback: str, run_dir: Path, named: str | None) -> None:
    """Refuse a callback of a run before its module is imported; see `_check`."""
    _check("callback", callback, run_dir, named, "train", {"callback": callback})


def _check(
    field: str,
    value: str,
    run_dir: Path,
    named: str | None,
    section: str,
    wanted: dict[str, str],
) -> None:
    """Refuse a run's `module:name` before the module is imported.

    From here on nothing at all is imported from the run directory, be it the current one.

    Args:
        named: the same field on the command line; None: it is not there.
        section, wanted: what config.json holds of it, if it is the user's own.

    Raises:
        UserError: the module lies in the run directory; or the command line does not name it, and
            config.json is somebody else's, or names another one.
    """
    run_dir = run_dir.absolute()
    if not _inside(__file__, run_dir):  # else a folder above the program was taken for a run
        sys.path[:] = [entry for entry in sys.path if not _inside(entry or ".", run_dir)]
    module = value.rpartition(":")[0]
    if not module:
        return
    if any(_inside(place, run_dir) for place in _places(module)):
        why = f"lies in the run directory {run_dir}, from which nothing is run"
        raise UserError(f"{field} {value} {why}: move it elsewhere")
    if value != named and not _is_own(run_dir / "config.json", section, wanted):
        why = f"{run_dir}/config.json is not yours or has another {field}"
        flag = f"--{field} {shlex.quote(value)}"
        fix = f"if you trust the module {module}, add {flag}, in Python {field}={value!r}"
        raise UserError(f"{field} {value} has code of its own, and {why}: {fix}")


def _is_own(path: Path, section: str, wanted: dict[str, str]) -> bool:
    """Return True for a config.json of this user that holds this."""
    try:
        with open(path, "rb", opener=plain_file) as file:
            about = os.fstat(file.fileno())
            config = json.loads(read_open(file, 2**20))
            mine = about.st_uid == os.getuid() and not about.st_mode & stat.S_IWOTH
            return mine and wanted.items() <= config[section].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _places(module: str) -> list[str]:
    """List where a module and the packages around it would be imported from; runs nothing."""
    found: list[str] = []
    path: Sequence[str] | None = None
    for part in module.split("."):
        try:
            spec = find_spec(part) if path is None else PathFinder.find_spec(part, path)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return found  # importing it says what is wrong
        path = list(spec.submodule_search_locations or [])
        found += [*path, *([spec.origin] if spec.has_location and spec.origin else [])]
    return found


def _inside(place: str | Path, folder: Path) -> bool:
    """Return True for a place in a folder, with or without links followed."""
    # normpath: without "..", and without following links
    places, folders = (
        {Path(os.path.normpath(Path.cwd() / one)), Path(one).resolve()} for one in (place, folder)
    )
    return any(one.is_relative_to(other) for one in places for other in folders)
