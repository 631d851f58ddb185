"""The graphs of one phase: which sizes are recorded, which one runs a step, and what happens when
one fails.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from ..kernels import ops
from ..kernels.platform import Platform
from .core.errors import CaptureError
from .recording import Recordable, Recorder, Recording

logger = logging.getLogger(__name__)

DummyStep = Callable[[int, int], AbstractContextManager[Sequence[torch.Tensor]]]
"""For a size and a seed, a block in which a step of that many made-up tokens can run, and its
inputs.

Equal arguments give equal steps, another seed gives others. What a step stores must go where no
request's tokens lie.
"""

Agree = Callable[[bool], bool]
"""Whether a piece of work succeeded here, to whether it did on every rank; waits for all."""

_CAPTURED, _CHECKED = 0, 1
"""Seeds of the step that is captured and of the one that is checked: a graph must not remember the
first.
"""

_FROM_PIECES = {torch.float32: 1e-4}
_FROM_PIECES_ELSE = 5e-2
"""How far nine of ten rows of a replay may be from the same forward without graphs, as a share of
the row's length.
"""
_FROM_EAGER = {torch.float32: 1e-2}
_FROM_EAGER_ELSE = 0.5
"""How far the middle row may be from eager. In 16 bits a network amplifies rounding: single tokens
are off by a third, with any two ways to compute them; a wrong address or a wrong piece gives all
rows other directions.
"""


class Reason(StrEnum):
    """Why a step ran without a graph, or a size has none."""

    TOO_LONG = "too_long"
    NOT_CAPTURED = "not_captured"
    PADDING = "padding"
    OUT_OF_MEMORY = "out_of_memory"
    CAPTURE_FAILED = "capture_failed"
    REPLAY_FAILED = "replay_failed"
    WRONG_RESULT = "wrong_result"
    INPUT_MOVED = "input_moved"
    STARTING = "starting"
    TRACE_FAILED = "trace_failed"
    COMPILE_FAILED = "compile_failed"
    NOT_IN_CACHE = "not_in_cache"


_REMEDY = {
    Reason.OUT_OF_MEMORY: "lower --mem-fraction-static or --piecewise-cuda-graph-max-tokens",
    Reason.CAPTURE_FAILED: "leave it out of --piecewise-cuda-graph-tokens, or try "
    "--piecewise-cuda-graph-compiler eager",
    Reason.REPLAY_FAILED: "--debug-cuda-graph tells which input moved",
    Reason.WRONG_RESULT: "try --piecewise-cuda-graph-compiler eager",
    Reason.INPUT_MOVED: "weights must be updated in place",
}


@dataclass(slots=True)
class GraphStats:
    """Counters of one phase's graphs. `capture_seconds`: by size. `graph_bytes`: of all pools."""

    replays: int = 0
    replayed_tokens: int = 0
    padded_tokens: int = 0
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    disabled: dict[int, Reason] = field(default_factory=dict)
    capture_seconds: dict[int, float] = field(default_factory=dict)
    num_graphs: int = 0
    graph_bytes: int = 0


class Graphs:
    """One forward's graphs by number of tokens. Nothing here raises because of a graph: a size that
    fails runs eagerly.

    `forward` is recorded; `eager` is what its answers are checked against. `buffers` are the static
    inputs, as long as the largest size; each size is recorded on their first rows. `phase` names
    the graphs in the log.
    """

    def __init__(
        self,
        forward: Recordable,
        platform: Platform,
        *,
        buffers: Sequence[torch.Tensor],
        sizes: Sequence[int],
        dummy_step: DummyStep,
        eager: Callable[..., torch.Tensor] | None = None,
        phase: str = "prefill",
        debug: bool = False,
        agree: Agree | None = None,
    ) -> None:
        """`agree`: None: there are no other ranks. With others a replay that fails is raised: they
        compute its padding.
        """
        self._agree = agree
        self._forward, self._platform = forward, platform
        self._buffers = list(buffers)
        self._dummy_step, self._eager = dummy_step, eager
        self._phase, self._debug = phase, debug
        self._pool = platform.graph_pool()
        self._bytes_of_earlier_pools = 0
        self._stream = platform.graph_stream()
        self._recordings: dict[int, Recording] = {}
        self._frozen = False
        self.sizes = sorted(set(sizes))
        self.stats = GraphStats()
        assert not self.sizes or self.sizes[-1] <= min(buffer.shape[0] for buffer in self._buffers)

    @property
    def captured(self) -> list[int]:
        """Sizes that can be replayed, ascending."""
        return sorted(self._recordings)

    def pending(self) -> list[int]:
        """Sizes that are still to be captured, from large to small, so that small ones find memory
        in the pool.
        """
        return [
            size
            for size in reversed(self.sizes)
            if size not in self._recordings and size not in self.stats.disabled
        ]

    def capture(self, size: int) -> bool:
        """Record a size, and check it. False if that failed: the size is disabled then, and a line
        in the log says why.
        """
        began = time.perf_counter()
        failure = self._try(size)
        if failure is not None:
            self._disable(size, failure)
            return False
        self.stats.num_graphs += self._recordings[size].num_graphs
        self.stats.graph_bytes = self._bytes_of_earlier_pools + self._platform.graph_bytes(
            self._pool
        )
        self.stats.capture_seconds[size] = time.perf_counter() - began
        return True

    def choose(self, num_tokens: int) -> int | None:
        """The captured size that a step of `num_tokens` is padded to; None: it runs eagerly, and
        the reason is counted.
        """
        size = next((size for size in self.captured if size >= num_tokens), None)
        if size is not None and size <= num_tokens * self._platform.padding_limit:
            return size
        self.stats.fallbacks[self._reason_for(num_tokens)] += 1
        return None

    def replay(self, size: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The forward on `inputs` [T, ...], T <= `size`: its first T rows, good until the next
        replay.

        None if the replay fails: the size is disabled, and the step must run eagerly.
        """
        recording = self._recordings[size]
        num_tokens = inputs[0].shape[0]
        if self._debug and (moved := recording.moved_input()) is not None:
            text = f"{moved} has moved in memory since the capture"
            if self._agree is not None:
                raise CaptureError(text)
            self._disable(size, _Failure(Reason.INPUT_MOVED, text))
            return None
        try:
            self._fill(inputs, num_tokens, size)
            output = recording.replay()
        except Exception as error:
            if self._agree is not None:
                raise
            self._disable(size, _Failure(Reason.REPLAY_FAILED, _sum_up(error)))
            return None
        self.stats.replays += 1
        self.stats.replayed_tokens += num_tokens
        self.stats.padded_tokens += size - num_tokens
        return output[:num_tokens]

    def _try(self, size: int) -> _Failure | None:
        """Record and check a size. A failure is returned as text: the exception itself would hold
        on to memory of the graphs.
        """
        recorder = Recorder(self._platform, self._pool, self._stream)
        with torch.no_grad(), self._quiet_gc():
            failure = self._attempt(self._record, size, recorder)
            if failure is None and self._eager is not None:
                failure = self._attempt(self._check, size)
        if failure is not None:
            recorder.abandon()
        return failure

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> _Failure | None:
        """Why it failed, here or on another rank."""
        failure = None
        try:
            work(*arguments)
        except Exception as error:
            match error:
                case _WrongResult():
                    reason = Reason.WRONG_RESULT
                case torch.OutOfMemoryError() | MemoryError():
                    reason = Reason.OUT_OF_MEMORY
                case _:
                    reason = Reason.CAPTURE_FAILED
            failure = _Failure(reason, _sum_up(error))
        if self._agree is not None and not self._agree(failure is None):
            return failure or _Failure(Reason.CAPTURE_FAILED, "it failed on another rank")
        return failure

    def _record(self, size: int, recorder: Recorder) -> None:
        static = [buffer[:size] for buffer in self._buffers]
        with self._dummy_step(size, _CAPTURED) as inputs:
            self._fill(inputs, size, size)
            # The first run at a size chooses kernels and makes workspaces, which no graph may hold.
            with self._platform.on_stream(self._stream):
                self._forward(*static)
            self._platform.synchronize()
            self._recordings[size] = self._forward.record(static, recorder)
            self._platform.synchronize()

    def _check(self, size: int) -> None:
        """Replays the size on other tokens than it was captured with, and compares. Raises
        `CaptureError`.
        """
        assert self._eager is not None

        def replayed(*inputs: torch.Tensor) -> torch.Tensor:
            self._fill(inputs, size, size)
            return self._recordings[size].replay()

        expected, pieces, actual = (
            _run_dummy(self._dummy_step, size, forward)
            for forward in (self._eager, self._forward, replayed)
        )
        distance = _row_distance(actual, pieces, 0.9)
        if not distance <= _FROM_PIECES.get(pieces.dtype, _FROM_PIECES_ELSE):
            raise _WrongResult(
                f"the replay differs from the same forward without a graph by {distance:.2g}"
            )
        distance = _row_distance(actual, expected, 0.5)
        if not distance <= _FROM_EAGER.get(expected.dtype, _FROM_EAGER_ELSE):
            raise _WrongResult(f"the replay differs from eager by {distance:.2g}")

    def _fill(self, inputs: Sequence[torch.Tensor], num_tokens: int, size: int) -> None:
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            buffer[:num_tokens].copy_(tensor)
            if num_tokens < size:
                buffer[num_tokens:size].zero_()

    def _reason_for(self, num_tokens: int) -> Reason:
        planned = next((size for size in self.sizes if size >= num_tokens), None)
        if planned is None:
            return Reason.TOO_LONG
        if planned > num_tokens * self._platform.padding_limit:
            return Reason.PADDING
        return self.stats.disabled.get(planned, Reason.NOT_CAPTURED)

    def _disable(self, size: int, failure: _Failure) -> None:
        self._recordings.pop(size, None)
        self.stats.disabled[size] = failure.reason
        remedy = _REMEDY[failure.reason]
        unit = "requests" if self._phase == "decode" else "tokens"
        logger.warning(
            "%s graphs: %d %s run without a graph (%s: %s); %s",
            self._phase,
            size,
            unit,
            *failure,
            remedy,
        )
        self._renew_pool()
        if failure.reason is Reason.OUT_OF_MEMORY:
            gc.collect()
            self._platform.empty_cache()

    def _renew_pool(self) -> None:
        """A new handle for the captures to come.

        torch refuses one whose graphs are all gone, and one that a failed capture left recording,
        and tells of neither beforehand.
        """
        self._platform.abandon_graph_pool(self._pool)
        self._bytes_of_earlier_pools = self.stats.graph_bytes if self._recordings else 0
        self._pool = self._platform.graph_pool()

    @contextmanager
    def _quiet_gc(self) -> Iterator[None]:
        """No collection during a capture: it could free memory of a graph. What is alive after the
        first stays out of all others.
        """
        if not self._frozen:
            gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if not self._frozen:
                gc.freeze()
                self._frozen = True
            if enabled:
                gc.enable()


def check_forward(
    forward: Callable[..., torch.Tensor],
    eager: Callable[..., torch.Tensor],
    dummy_step: DummyStep,
    size: int,
    agree: Agree | None = None,
) -> Iterator[None]:
    """Compares what was traced of a model with the model, on `size` made-up tokens, one forward for
    each turn of the iterator.

    It calls the same kernels in the same order, so the results are equal but for kernels that do
    not repeat themselves. `eager` is traced in plain torch or in the device's own ops: one of the
    two must be met. `agree`: as of `Graphs`. Raises `CaptureError` where it is another function.
    """
    actual, distances = _run_dummy(dummy_step, size, forward), []
    yield
    for context in (ops.plain_torch, nullcontext):
        with context():
            expected = _run_dummy(dummy_step, size, eager)
        distances.append(_row_distance(actual, expected, 0.9))
        is_met = distances[-1] <= _FROM_PIECES.get(expected.dtype, _FROM_PIECES_ELSE)
        if is_met if agree is None else agree(is_met):
            return
        yield
    raise _WrongResult(f"what was traced differs from the model by {min(distances):.2g}")


def _run_dummy(
    dummy_step: DummyStep, size: int, forward: Callable[..., torch.Tensor]
) -> torch.Tensor:
    with torch.no_grad(), dummy_step(size, _CHECKED) as inputs:
        return forward(*inputs).clone()


class _WrongResult(CaptureError):
    """A replay, or the forward in pieces, gave other numbers than eager."""


class _Failure(NamedTuple):
    """Why a size is disabled, and what happened."""

    reason: Reason
    text: str


def _row_distance(actual: torch.Tensor, expected: torch.Tensor, quantile: float) -> float:
    """How far rows [T, H] are from what they should be, relative to their lengths: the given
    quantile. NaN if any row is.
    """
    actual, expected = actual.float(), expected.float()
    distance = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    share: float = distance.quantile(quantile).item()
    return share


def _sum_up(error: BaseException) -> str:
    """What happened and where, in one line."""
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return ", ".join([*getattr(error, "__notes__", []), first_line])
