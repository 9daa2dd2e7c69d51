"""Damage a real checkpoint in thousands of ways: none may load, none may run anything.

    python benchmarks/corruptions.py [--num 1000] [--seed 1] [--run_dir RUN]

Takes the two newest checkpoints of a run (without --run_dir: of a tiny one that it trains first),
copies them to a temporary folder and damages the copy of the newest:

- random damage: flipped bits, changed bytes, cut ends, inserted bytes, swapped and zeroed blocks;
- every byte of the archive's structure changed, one at a time: local headers, directory, trailing
  record, checksum;
- the pickle inside changed at random and the checksum made right again, as somebody with bad
  intentions would: it may load, but only as plain data, or be refused;
- pickles that call something when loaded, with a right checksum.

Prints a table and exits with 1 if anything was loaded that should not, anything ran, or a refusal
was not one line that names the file.
"""

from __future__ import annotations

import argparse
import collections
import io
import logging
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rl_dist.checkpoint.store import (
    CHECKPOINT_DIR,
    CheckpointError,
    check_plain,
    checkpoint_files,
    latest_checkpoint,
    load_checkpoint,
    seal,
)

TINY = "--env Recall-v0 --num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4 --hidden_size 8"
OFTEN = (
    "--total_steps 128 --checkpoint_every 1 --validate_every 0 --eval_episodes 1 --device cpu "
    "--num_gpus 1"
)
RUNNING = {
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "exec"),
    *("compile", "import", "socket.connect", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir"),
}
_heard: list[str] | None = None  # what Python's audit hook hears while a file is loaded


def _listen(event: str, args: tuple) -> None:
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if _heard is not None and (writes or event in RUNNING):
        _heard.append(event)


sys.addaudithook(_listen)


def _changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    # half of the time less than 200 bytes of the end
    return data[: -rng.randint(1, 200)] if rng.random() < 0.5 else data[: rng.randrange(len(data))]


def _flip_bit(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return _changed(data, at, bytes([data[at] ^ 1 << rng.randrange(8)]))


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    return _changed(data, rng.randrange(len(data) - 8), rng.randbytes(rng.randint(1, 8)))


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice([0, len(data), rng.randrange(len(data))])
    return data[:at] + rng.randbytes(rng.choice([1, 16, 512, 4096])) + data[at:]


def _swap_blocks(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice([16, 512, 4096])
    one, other = sorted(rng.sample(range(len(data) // size), 2))
    left, right = (data[at * size : (at + 1) * size] for at in (one, other))
    return _changed(_changed(data, one * size, right), other * size, left)


def _zero_block(data: bytes, rng: random.Random) -> bytes:
    # as a disk leaves where nothing was written
    at = rng.randrange(len(data))
    return _changed(data, at, bytes(min(rng.choice([16, 512, 4096]), len(data) - at)))


KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flip_bit,
    "bytes changed": _change_bytes,
    "ends cut off": _cut,
    "bytes inserted": _insert,
    "blocks swapped": _swap_blocks,
    "blocks zeroed": _zero_block,
}


def random_damage(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` kinds of damage by turns, each of which changes the bytes."""
    rng = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        damaged = data
        while damaged == data:
            damaged = KINDS[kind](data, rng)
        yield kind, damaged


def structure(data: bytes) -> list[int]:
    """Places of the bytes that are no record's content: headers, directory, trailing record."""
    content: set[int] = set()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            # lengths of name and extra field
            names = data[info.header_offset + 26 : info.header_offset + 30]
            lengths = int.from_bytes(names[:2], "little") + int.from_bytes(names[2:], "little")
            start = info.header_offset + 30 + lengths
            content.update(range(start, start + info.compress_size))
    return [at for at in range(len(data)) if at not in content]


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with another pickle, sealed with a right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            pickled = info.filename.endswith("data.pkl")
            new.writestr(info.filename, change(content) if pickled else content)
    return seal(buffer.getvalue())


def always(content: bytes) -> Callable[[bytes], bytes]:
    """A change that puts this content in place of any."""
    return lambda _: content


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function with one string when it is loaded; protocol 2."""
    text = argument.encode()
    head = b"\x80\x02c" + f"{module}\n{name}\nX".encode() + len(text).to_bytes(4, "little")
    return head + text + b"\x85R."


def hostile(marker: Path) -> dict[str, bytes]:
    """Pickles that would create the marker file, by name of what they call."""
    write = f"open({str(marker)!r}, 'w')"
    touch, path = f"touch {marker}", str(marker)
    calls = {
        "posix.system": touch,
        "os.system": touch,
        "subprocess.getoutput": touch,
        "subprocess.Popen": touch,
        "builtins.eval": write,
        "builtins.exec": write,
        "__builtin__.eval": write,
        "builtins.open": path,
        "builtins.__import__": "antigravity",
        "runpy.run_path": "x.py",
        "torch.load": path,
        "torch.hub.load": "a/b",
        "torch.jit.load": path,
        "torch.serialization.add_safe_globals": "x",
        "numpy.load": path,
        "os.remove": "x",
    }
    return {
        name: calling(name.rpartition(".")[0], name.rpartition(".")[2], argument)
        for name, argument in calls.items()
    }


@dataclass
class Trials:
    """A folder with two checkpoints, of which the newer is damaged again and again."""

    run_dir: Path
    original: bytes
    older: Path
    newest: Path
    tried: collections.Counter = field(default_factory=collections.Counter)
    refused: collections.Counter = field(default_factory=collections.Counter)
    causes: collections.Counter = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)

    @staticmethod
    def of(run_dir: Path, folder: Path) -> Trials:
        """Copies of a run's two newest checkpoints below `folder`."""
        target = folder / "run" / CHECKPOINT_DIR
        target.mkdir(parents=True)
        newest = checkpoint_files(run_dir / CHECKPOINT_DIR)[-2:]
        files = [Path(shutil.copy(path, target)) for path in newest]
        assert len(files) == 2, f"{run_dir} has fewer than two checkpoints"
        load_checkpoint(files[0])  # imports what loading imports, before anybody listens
        original = load_checkpoint(files[1])
        files[1].write_bytes(with_pickle(data := files[1].read_bytes(), lambda content: content))
        assert str(load_checkpoint(files[1])) == str(original), "not rebuilt as it was"
        return Trials(folder / "run", data, files[0], files[1])

    def run(
        self, kind: str, damaged: bytes, *, may_load: bool = False, fall_back: bool = False
    ) -> None:
        """Load one damaged file and keep what happened."""
        global _heard
        assert damaged != self.original
        self.tried[kind] += 1
        self.newest.write_bytes(damaged)
        _heard = []
        loaded, error = None, ""
        try:
            loaded = load_checkpoint(self.newest)
        except CheckpointError as refusal:
            error = str(refusal)
        except Exception as other:  # no clear line
            self._violate(kind, f"{type(other).__name__} instead of a refusal: {other}")
        found = latest_checkpoint(self.run_dir) if fall_back else self.older
        heard, _heard = _heard, None
        if heard:
            self._violate(kind, f"ran {heard}")
        if found != self.older:
            self._violate(kind, f"went on from {found}")
        if error:
            self.refused[kind] += 1
            cause = re.sub("cannot read it: .*", "cannot read it", error)
            cause = re.sub(r"wants to run \S+,", "wants to run ...,", cause)
            self.causes[cause.replace(str(self.newest), "FILE")] += 1
            if str(self.newest) not in error or not error.isprintable() or len(error) > 500:
                self._violate(kind, f"no clear line: {error!r}")
        elif isinstance(loaded, dict) and may_load:
            check_plain(loaded, kind)
        elif loaded is not None:
            self._violate(kind, "loaded")

    def _violate(self, kind: str, what: str) -> None:
        self.violations.append(f"{kind}, number {self.tried[kind]}: {what}")

    def table(self) -> str:
        """Return counts by kind, and how often each cause was given."""
        rows = [f"{'damage':<44}{'tried':>7}{'refused':>9}{'loaded':>8}"]
        for kind, tried in self.tried.items():
            refused = self.refused[kind]
            rows.append(f"{kind:<44}{tried:>7,}{refused:>9,}{tried - refused:>8,}")
        rows += ["", f"{'times':>7}  cause"]
        return "\n".join(rows + [f"{n:>7,}  {cause}" for cause, n in self.causes.most_common()])


def try_everything(trials: Trials, count: int, seed: int) -> None:
    """All four parts."""
    data, rng = trials.original, random.Random(seed + 1)
    for kind, damaged in random_damage(data, count, seed):
        trials.run(kind, damaged, fall_back=True)
    for at in structure(data):
        changed = _changed(data, at, bytes([data[at] ^ rng.randint(1, 255)]))
        trials.run("each byte of headers and trailing record", changed)
    for _ in range(count // 5):
        changed = with_pickle(data, lambda content: _change_bytes(content, rng))
        trials.run("pickle changed, checksum right", changed, may_load=True)
    marker = trials.run_dir / "marker"
    for pickled in hostile(marker).values():
        damaged = with_pickle(data, always(pickled))
        trials.run("hostile pickle, checksum right", damaged, fall_back=True)
        if marker.exists():
            trials.violations.append("a hostile pickle wrote its marker")


def train_tiny(folder: Path) -> Path:
    """A run of two iterations with a checkpoint of each."""
    run_dir = folder / "tiny"
    script = Path(__file__).parents[1] / "train_distributed.py"
    subprocess.run(
        [sys.executable, str(script), *TINY.split(), *OFTEN.split(), "--run_dir", str(run_dir)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return run_dir


def main() -> int:
    """Entry of the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=1000, help="random corruptions (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the damage (default: 1)")
    what = "a run with two checkpoints (default: a tiny one is trained)"
    parser.add_argument("--run_dir", type=Path, help=what)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # that a file was skipped, a thousand times
    with tempfile.TemporaryDirectory(prefix="corruptions_") as name:
        folder = Path(name)
        trials = Trials.of(args.run_dir or train_tiny(folder), folder)
        inside = len(structure(trials.original))
        size = len(trials.original)
        print(f"checkpoint of {size:,} bytes, {inside:,} of them structure", flush=True)
        try_everything(trials, args.num, args.seed)
    print(trials.table())
    for violation in trials.violations[:20]:
        print(f"VIOLATION {violation}")
    print(f"{sum(trials.tried.values()):,} damaged files, {len(trials.violations)} violations")
    return 1 if trials.violations else 0


if __name__ == "__main__":
    sys.exit(main())
