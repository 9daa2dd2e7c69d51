"""Check that the modules that a run uses are trusted, before they are imported.

A run directory may come from someone else, so no code in it is ever executed. A module that a run
uses is imported only in two cases: the user has named the module on the command line, or the user
owns the config.json that names it.
"""

import importlib
import json
import os
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_dist import users_folders
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line
from rl_dist.files import plain_file


def import_from_here(*values: str) -> None:
    """Append the current directory to sys.path if a value has the form `module:name`.

    This is needed because Python adds only the folder of a script to sys.path. Ranks inherit
    sys.path. An entry "" of sys.path is not enough, because an environment may change the current
    directory.
    """
    here = str(Path.cwd())
    if any(":" in value for value in values) and here not in sys.path:
        sys.path.append(here)


def import_own(field: str, value: str) -> Any:
    """Import the user's class or function that `value` names in the form `module:name`.

    Args:
        field: name of the flag, for error messages.

    Raises:
        UserError: the module does not exist, raises an error during import, or does not contain
            the name.
    """
    module, _, name = value.partition(":")
    try:
        imported_module = importlib.import_module(module)
    except FOREIGN_ERRORS as error:
        raise UserError(f"{field} {value!r}: the import raised {one_line(error)}") from error
    imported_object = getattr(imported_module, name, None)
    if not callable(imported_object):
        problem = f"({imported_module.__file__}) has no function or class {name}"
        raise UserError(f"{field} {value!r}: {module} {problem}")
    return imported_object


def module_files(names: Sequence[str]) -> dict[str, list[Path]]:
    """Find the files of the module in each `module:name`, without importing the module."""
    modules = {module for name in names if (module := name.rpartition(":")[0])}
    return {module: [*filter(Path.is_file, map(Path, _places(module)))] for module in modules}


def check_named(run_dir: Path, section: str, saved: Mapping[str, str], given: str | None) -> None:
    """Refuse an untrusted `module:name` of a run before it is imported.

    The module may be in the current directory, so this function calls `import_from_here`. It then
    removes the run directory from sys.path, so that nothing is imported from it later, even if it
    is the current directory.

    Args:
        section: section of config.json that holds these values.
        saved: values of this section in the checkpoint; the first one is the `module:name`.
        given: the `module:name` on the command line, or None.

    Raises:
        UserError: the module is in the run directory; or the module is named neither on the command
            line nor in a config.json of this user (see `_is_own`).
    """
    run_dir = run_dir.absolute()
    field, value = next(iter(saved.items()))
    import_from_here(value)
    if not _inside(__file__, run_dir):  # this program may itself be in run_dir
        sys.path[:] = [entry for entry in sys.path if not _inside(entry or ".", run_dir)]
    module = value.rpartition(":")[0]
    if not module:
        return
    if any(_inside(place, run_dir) for place in _places(module)):
        why = f"is in the run directory {run_dir}, from which no code is run"
        raise UserError(f"{field} {value} {why}: move it elsewhere")
    if value != given and not _is_own(run_dir / "config.json", section, saved):
        why = f"{run_dir} has no config.json that sets this {field} and that only you can write"
        flag = f"--{field} {shlex.quote(value)}"
        fix = f"if you trust the module {module}, add {flag}, or in Python {field}={value!r}"
        raise UserError(f"{field} {value} would run code, but {why}: {fix}")


def _is_own(path: Path, section: str, saved: Mapping[str, str]) -> bool:
    """Return True if config.json belongs to this user and contains the values.

    A file that every user may write is not accepted.
    """
    try:
        with open(path, "rb", opener=plain_file) as file:
            file_status = os.fstat(file.fileno())
            config = json.loads(file.read(2**20))
            is_mine = file_status.st_uid == os.getuid() and not file_status.st_mode & stat.S_IWOTH
            return is_mine and saved.items() <= config[section].items()
    except Exception:  # a hostile file can cause many types of errors
        return False


def _places(module: str) -> list[str]:
    """List the files and package folders that importing a module would use."""
    places: list[str] = []
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth, part in enumerate(parts, 1):
        try:
            spec = find_spec(part) if path is None else PathFinder.find_spec(part, path)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return places  # importing the module will report this problem
        path = list(spec.submodule_search_locations or [])
        places += [*path, *([spec.origin] if spec.has_location and spec.origin else [])]
        path += users_folders(".".join(parts[:depth]))
    return places


def _inside(place: str | Path, folder: Path) -> bool:
    """Return True if a path is in a folder, either as written or after following links."""
    # Each set contains a path as written and the same path after following links. normpath resolves
    # ".." without following links.
    places, folders = (
        {Path(os.path.normpath(Path.cwd() / path)), Path(path).resolve()}
        for path in (place, folder)
    )
    return any(inner.is_relative_to(outer) for inner in places for outer in folders)
