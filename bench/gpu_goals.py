"""The GPU suite's goals for an H200 with Llama-3.1-8B's shapes, beside the figures of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SMALL_PREFILL = 512
_LARGE_PREFILL = 4096


class Goal(NamedTuple):
    """A goal. `measured` and `bound` have the same unit, which is part of `text`."""

    figure: str
    bound: float
    measured: float
    text: str
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def cells(self) -> list[str]:
        """Return the row of the table: figure, goal, measured, met."""
        bound = f"at {'least' if self.at_least else 'most'} {self.text.format(self.bound)}"
        return [
            self.figure,
            bound,
            self.text.format(self.measured),
            "yes" if self.met else "**no**",
        ]


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """Return the goals whose parts are all among the results."""
    return [*_prefills(results), *_floors(results), *_load(results), *_startup(results)]


def _times(results: Mapping[str, Any], part: str, size: str) -> dict[int, float]:
    return {row[size]: row["ms"] for row in results.get(part, {}).get("rows", [])}


def _prefills(results: Mapping[str, Any]) -> Iterator[Goal]:
    """Yield the goals of prefills. The slowest size counts."""
    off = _times(results, "prefill_off", "tokens")
    for mode in ("piecewise_eager", "piecewise_inductor"):
        gains = {
            size: off[size] / ms
            for size, ms in _times(results, f"prefill_{mode}", "tokens").items()
            if size in off
        }
        small = [gain for size, gain in gains.items() if size <= _SMALL_PREFILL]
        if small:
            yield Goal(
                f"prefill of up to {_SMALL_PREFILL} tokens, {mode} against off",
                1.8,
                min(small),
                "{:.2f}x",
            )
            yield Goal(
                f"prefill of any size, {mode} against off", 0.99, min(gains.values()), "{:.2f}x"
            )


def _floors(results: Mapping[str, Any]) -> Iterator[Goal]:
    floors = results.get("floors")
    if floors is None:
        return
    for row in results.get("decode_full", {}).get("rows", []):
        if row["batch"] == 1:
            share = row["bytes"] / floors["copy_bytes_per_second"] / (row["ms"] / 1e3)
            yield Goal("decode at batch 1, share of the copy rate", 0.8, share, "{:.0%}")
    large = [
        row["flops"] / floors["matmul_flops_per_second"] / (row["ms"] / 1e3)
        for part in results
        if part.startswith("prefill_")
        for row in results[part]["rows"]
        if row["tokens"] == _LARGE_PREFILL
    ]
    if large:
        yield Goal(
            f"prefill of {_LARGE_PREFILL} tokens by the fastest mode, share of the matrix rate",
            0.6,
            max(large),
            "{:.0%}",
        )


def _load(results: Mapping[str, Any]) -> Iterator[Goal]:
    if {"load_graphs", "load_off"} <= results.keys():
        gain = (
            results["load_graphs"]["output_tokens_per_second"]
            / results["load_off"]["output_tokens_per_second"]
        )
        yield Goal("load in the shape of GSM8K, graphs against none", 1.25, gain, "{:.2f}x")


def _startup(results: Mapping[str, Any]) -> Iterator[Goal]:
    if "startup_cold" in results:
        yield Goal(
            "capture of all default sizes",
            20.0,
            results["startup_cold"]["capture_seconds"],
            "{:.1f} s",
            at_least=False,
        )
