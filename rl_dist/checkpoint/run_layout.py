"""The files that training writes in a run directory, and a check of their kinds."""

from __future__ import annotations

from pathlib import Path

from rl_dist.errors import UserError

OURS = {  # patterns of files by folder
    "": ("config.json", "metrics.jsonl", "state.json", "summary.json*", "events.out.tfevents.*"),
    "checkpoints": (),  # its files are written under new names, and read as plain files only
    "logs": ("rank_*.log", "rank_*.jsonl"),
    "plots": ("*.png*",),
    "profile": ("*",),
}


def check_layout(run_dir: Path) -> None:
    """Refuse what cannot be written, or leads out of the run directory.

    Raises:
        UserError: names the first thing that is no plain file or no folder.
    """
    wrong = []
    for name, patterns in OURS.items() if run_dir.is_dir() else ():
        folder = run_dir / name
        if folder.exists() and not folder.is_dir():
            wrong.append(f"{folder} is no folder")
        found = (path for pattern in patterns for path in folder.glob(pattern))
        odd = (path for path in found if path.is_symlink() or not path.is_file())
        wrong += [f"{path} is no plain file" for path in odd]
    if wrong:
        raise UserError(f"{wrong[0]}, as it is in a run directory: move it away")
