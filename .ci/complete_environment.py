"""Install what this Python lacks of the project's requirements, nothing else.

`make ... VENV=/path` runs it with that environment's Python, from the root of the checkout. What is
installed there (torch first of all) is pinned to its present version; what is missing comes as
constraints.txt says.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path

try:  # in every environment that meets the requirements
    from packaging.requirements import Requirement
except ImportError:
    try:  # pip carries a copy
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        sys.exit(
            f"error: {sys.prefix} has no pip to install with: run {sys.executable} -m ensurepip"
        )


def canonical(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extras: list[str]) -> list[Requirement]:
    """The dependencies and those of the extras, as pyproject.toml names them."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [
        r for extra in extras for r in project["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def pins(installed: dict[str, str]) -> list[str]:
    """Constraints: what is installed stays, the rest follows constraints.txt."""
    tested = (
        line.strip() for line in Path("constraints.txt").read_text().splitlines() if "==" in line
    )
    ours = [
        line for line in tested if not line.startswith("#") and line.split("==")[0] not in installed
    ]
    return [f"{name}=={version}" for name, version in installed.items()] + ours


def install(missing: list[Requirement], installed: dict[str, str]) -> int:
    """Let pip add the missing requirements; returns pip's exit status."""
    if "pip" not in installed:
        sys.exit(
            f"error: {sys.prefix} has no pip to install with: run {sys.executable} -m ensurepip"
        )
    print(f"installing into {sys.prefix}: {', '.join(r.name for r in missing)} ...", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins(installed)))
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        return subprocess.run(
            [*pip, "-c", constraints.name, *map(str, missing)], check=False
        ).returncode


def main(extras: list[str]) -> int:
    """Returns the exit status: 0 when every requirement is met."""
    installed = {canonical(d.metadata["Name"]): d.version for d in reversed(list(distributions()))}
    missing = []
    for requirement in requirements(extras):
        version = installed.get(canonical(requirement.name))
        if version is None:
            missing.append(requirement)
        elif not requirement.specifier.contains(version, prereleases=True):
            found = f"{sys.prefix} has {requirement.name} {version}, not {requirement.specifier}"
            sys.exit(f"error: {found}: upgrade it there, or leave VENV out and .venv is made")
    return install(missing, installed) if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
