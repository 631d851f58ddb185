"""Lists of CPUs as the kernel writes them (0-3,8), and as `--cpu-bind` takes them: one per rank."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def check_lists(text: str) -> None:
    """Raise `ValueError` if `text` is not valid for `--cpu-bind` with any number of ranks."""
    if text not in ("auto", "none"):
        for part in text.split("|"):
            parse_list(part, text)


def parse_lists(text: str, ranks: int) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each rank from `0-15,16-31`, or from `0-7,32-39|8-15,40-47` if a rank has
    several ranges.

    Raise `ValueError` if the text is invalid or does not have one list for each of `ranks`.
    """
    lists = [text] if ranks == 1 and "|" not in text else text.split("|" if "|" in text else ",")
    parts = tuple(parse_list(part, text) for part in lists)
    if len(parts) != ranks:
        raise ValueError(
            f"--cpu-bind {text} lists cores for {len(parts)} ranks, but this machine has {ranks}; "
            "give one list for each, separated by |"
        )
    return parts


def parse_list(part: str, text: str) -> frozenset[int]:
    """Return the CPUs of one list, which is a part of `text`. Raise `ValueError` that quotes
    `text`.
    """
    found: set[int] = set()
    for piece in part.split(","):
        match = _RANGE.fullmatch(piece.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(
                f"--cpu-bind {text}: {piece.strip()!r} is not a range of CPUs; give auto, none, or "
                "a list for each rank such as 0-15,16-31"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def write_list(cpus: Iterable[int]) -> str:
    """Return a list as the kernel writes it: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
