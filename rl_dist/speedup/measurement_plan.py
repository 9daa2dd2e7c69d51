"""What a calibration is going to measure, and about how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REDUCTIONS = 0.3  # of the first short run's time


def share_flags(num_envs: int, batch_size: int, ranks: int, scaling: str) -> tuple[list[str], str]:
    """The sizes of one rank among `ranks` as flags, or why they cannot be shared out."""
    if scaling == "weak":
        return [f"--num_envs={num_envs}"], ""
    if num_envs % ranks or batch_size % ranks:
        what = f"num_envs {num_envs} and batch_size {batch_size} do not divide over {ranks} ranks"
        return [], f"{what}: choose multiples of {ranks}, or --scaling weak"
    return [f"--num_envs={num_envs // ranks}", f"--batch_size={batch_size // ranks}"], ""


def expected_times(
    gpus: Sequence[int],
    scalings: Sequence[str],
    *,
    divides: Callable[[int, str], bool],
    copies: Callable[[int], int],
    cores: int,
    reduced: set[int],
    uncontended: bool,
) -> list[float]:
    """Expected times of all measurements after the first, in units of the first.

    Half of a short run is taken to be the start of the program, which no smaller share shortens.

    Args:
        gpus: numbers of ranks.
        divides: whether the job can be shared out over so many ranks, scaled so.
        copies: trainings side by side that stand for so many ranks.
        reduced: numbers of ranks whose reductions can be measured.
        uncontended: the share of several copies is measured in one copy as well.
    """
    found, left = [], set(reduced)

    def reduce(ranks: int) -> None:
        if ranks in left:
            left.remove(ranks)
            found.append(REDUCTIONS * max(1.0, ranks / cores))

    if reduced:
        reduce(2)  # tells the link
    for scaling in scalings:
        for ranks in (number for number in gpus if number > 1 and divides(number, scaling)):
            alone = 1.0 if scaling == "weak" else (1 + 1 / ranks) / 2
            found.append(alone * max(1.0, copies(ranks) / cores))
            if uncontended and scaling != "weak" and copies(ranks) > 1:
                found.append(alone)
            reduce(ranks)
    return found
