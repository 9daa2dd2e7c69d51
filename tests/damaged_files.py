"""Damage checkpoint files in many ways, and pickles that call something when they are loaded."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rl_dist.checkpoint.store import seal


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


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with another pickle, sealed with a right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            pickled = info.filename.endswith("data.pkl")
            new.writestr(info.filename, change(content) if pickled else content)
    return seal(buffer.getvalue())


def with_seal(data: bytes) -> bytes:
    """The same bytes with a right checksum."""
    return data[:-64] + hashlib.sha256(data[:-71]).hexdigest().encode()


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
