"""Measures prompts through layers with a recurrent state, without their projections, by the C++
kernels and by plain torch: `python -m piecework.lab.recurrent_prompts`.

Each figure is the least of all rounds, which take the two in turn. Shares: of what the cores do in
float32, by the multiply-adds of the recurrence itself (three a number of a state and token for the
gated delta rule, two for Mamba 2); of what memory is read at, by the bytes of a short convolution's
input and result. `--processor-time`: that of all threads, and no shares, where others work on the
machine too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels import recurrent_prompts
from ..kernels.cpu.native import recurrent
from ..kernels.cpu.native.peaks import Peaks, measure_peaks
from ..kernels.recurrent_steps import DeltaWeights, Mamba2Weights, States
from ..kernels.state_plan import plan_states


class Shape(NamedTuple):
    """Heads of `size` numbers with `numbers` of a state for each, groups of heads; `columns` of the
    convolution over `channels`; `decays`: as of `DeltaWeights`.
    """

    heads: int
    groups: int
    size: int
    numbers: int
    channels: int
    columns: int = 4
    decays: int = 1


_DELTA = ("gated delta net", "Kimi Delta Attention")
_SHAPES = {
    "gated delta net": Shape(16, 16, 128, 128, 6144),
    "Kimi Delta Attention": Shape(32, 32, 128, 128, 12288, decays=128),
    "Mamba 2": Shape(32, 1, 64, 128, 2304),
    "short convolution": Shape(0, 0, 0, 0, 1024, columns=3),
}
"""Of Qwen3.5 0.8B, Kimi Linear 48B, Granite 4.0 H 350M and LFM2 350M."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="piecework.lab.recurrent_prompts", description=__doc__)
    parser.add_argument("--tokens", default="256,1024,4096", help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="(default: torch's)")
    parser.add_argument("--processor-time", action="store_true", help="of all threads")
    given = parser.parse_args(arguments)
    lengths = [int(each) for each in given.tokens.split(",")]
    if min(lengths) < 2 or given.rounds < 1 or given.threads < 0:
        parser.error("--tokens must be 2 or more, --rounds 1 or more, --threads 0 or more")
    if given.threads:
        torch.set_num_threads(given.threads)
    clock = time.process_time if given.processor_time else time.perf_counter
    peaks = None if given.processor_time else measure_peaks()
    print("| layer | tokens | kernels, ms | plain torch, ms | times | of the peak |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for kind, shape in _SHAPES.items():
        for tokens in lengths:
            ours, plain = _least(kind, shape, tokens, given.rounds, clock)
            cells = [f"{ours * 1e3:.2f}", f"{plain * 1e3:.2f}", f"{plain / ours:.1f}"]
            cells.append(
                "" if peaks is None else f"{_share(kind, shape, tokens / ours, peaks):.0%}"
            )
            print(f"| {kind} | {tokens} | {' | '.join(cells)} |", flush=True)
    return 0


def _least(
    kind: str, shape: Shape, tokens: int, rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds by the kernels and by plain torch."""
    run = _prepare(kind, shape, tokens)
    best = [float("inf")] * 2
    for _ in range(rounds):
        for place, module in enumerate((recurrent, recurrent_prompts)):
            began = clock()
            run(module)
            best[place] = min(best[place], clock() - began)
    return best[0], best[1]


def _share(kind: str, shape: Shape, tokens: float, peaks: Peaks) -> float:
    """Of the machine's peak, of so many tokens a second."""
    if not shape.heads:
        return 2 * torch.bfloat16.itemsize * shape.channels * tokens / peaks.read
    each = 6 if kind in _DELTA else 4
    numbers = shape.heads * shape.size * shape.numbers
    return each * numbers * tokens / peaks.operations["float32"]


def _prepare(kind: str, shape: Shape, tokens: int) -> Callable[[Any], None]:
    """A prompt in bfloat16, through the functions of a module."""
    noise = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=noise)

    heads, channels = shape.heads, shape.channels
    decays = heads * shape.decays
    rows = random(tokens, channels + heads + decays).to(torch.bfloat16)
    x, first, second = rows.tensor_split([channels, channels + heads], dim=-1)
    conv, bias = random(channels, shape.columns) / 2, random(channels)
    a = -random(heads).exp()
    of_head = (shape.numbers, shape.size) if kind in _DELTA else shape[2:4]
    states = States(
        torch.zeros(2, shape.columns - 1, channels, dtype=torch.bfloat16),
        torch.zeros(2, heads, *of_head),
    )
    prompts = plan_states([tokens], torch.tensor([1])).prompts
    assert prompts is not None
    out = torch.zeros(tokens, heads * shape.size or channels, dtype=torch.bfloat16)
    delta = DeltaWeights(conv, a, random(decays))
    mamba = Mamba2Weights(conv, bias, a, a, a, (0.0, float("inf")))

    def run(module: Any) -> None:
        if kind in _DELTA:
            module.gated_delta_prompts(x, first, second, delta, out, states, prompts)
        elif kind == "Mamba 2":
            module.mamba2_prompts(x, first, mamba, out, states, prompts)
        else:
            module.conv_prompts(x, conv, bias, out, states.conv, prompts)

    return run


if __name__ == "__main__":
    sys.exit(main())
