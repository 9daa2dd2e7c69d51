"""What lies in a run directory under the names of what training writes there."""

from __future__ import annotations

from pathlib import Path

from rl_dist.errors import UserError

OURS = {  # patterns of files by folder
    "": ("config.json", "metrics.jsonl", "summary.json*", "events.out.tfevents.*"),
    "checkpoints": (),  # its files are written under new names, and read as plain files only
    "logs": ("rank_*.log",),
    "plots": ("*.png*",),
    "profile": ("*",),
}


def check_layout(run_dir: Path) -> None:
    """Refuse what cannot be written, or leads out of the run directory.

    Raises:
        UserError: names the first thing that is no plain file or no folder.
    """
    for name, patterns in OURS.items() if run_dir.is_dir() else ():
        folder = run_dir / name
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is no folder, as it is in a run directory: move it away")
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.is_symlink() or not path.is_file():
                raise UserError(f"{path} is no plain file, as it is in a run directory: move it away")
