"""The graphs of one phase: records sizes, chooses the size of a step, and handles failures."""

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
from ..kernels.platform.graph_capture import GraphCapture
from .core.errors import CaptureError
from .recording import Recordable, Recorder, Recording

logger = logging.getLogger(__name__)

# Takes a size and a seed. Yields the inputs of a step of that many made-up tokens, in a block in
# which the step can run. Equal arguments give equal steps. Another seed gives other tokens. The
# step must not store keys and values where those of requests are.
DummyStep = Callable[[int, int], AbstractContextManager[Sequence[torch.Tensor]]]

# Takes whether work succeeded on this rank. Waits for all ranks and returns whether it succeeded on
# every rank.
Agree = Callable[[bool], bool]

# Seeds of the step that is captured and of the step that is checked. They differ, to detect a graph
# that has recorded values of the first step.
_CAPTURED, _CHECKED = 0, 1

# Largest distance of nine of ten rows of a replay from the same forward without graphs, relative to
# the length of the row.
_FROM_PIECES = {torch.float32: 1e-4}
_FROM_PIECES_ELSE = 5e-2
# Largest distance of the median row from eager. In 16 bits a network amplifies rounding: between
# any two ways to compute them, single tokens differ by a third. A wrong address or piece changes
# the direction of all rows.
_FROM_EAGER = {torch.float32: 1e-2}
_FROM_EAGER_ELSE = 0.5


class Reason(StrEnum):
    """The reason why a step ran without a graph, or why a size has none."""

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
    Reason.REPLAY_FAILED: "--debug-cuda-graph names the input that moved",
    Reason.WRONG_RESULT: "try --piecewise-cuda-graph-compiler eager",
    Reason.INPUT_MOVED: "weights must be updated in place",
}


@dataclass(slots=True)
class GraphStats:
    """Counters of one phase. `capture_seconds` is by size; `graph_bytes` counts all pools."""

    replays: int = 0
    replayed_tokens: int = 0
    padded_tokens: int = 0
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    disabled: dict[int, Reason] = field(default_factory=dict)
    capture_seconds: dict[int, float] = field(default_factory=dict)
    num_graphs: int = 0
    graph_bytes: int = 0


class Graphs:
    """The graphs of one forward, by number of tokens. A size that fails runs eagerly.

    `forward` is recorded, and compared with `eager`. `buffers` are the static inputs, as long as
    the largest size. Each size is recorded on their first rows. `phase` names the graphs in the
    log.
    """

    def __init__(
        self,
        forward: Recordable,
        platform: GraphCapture,
        *,
        buffers: Sequence[torch.Tensor],
        sizes: Sequence[int],
        dummy_step: DummyStep,
        eager: Callable[..., torch.Tensor] | None = None,
        phase: str = "prefill",
        debug: bool = False,
        agree: Agree | None = None,
    ) -> None:
        """`agree` is None if there is one rank. With several ranks, a failed replay raises, because
        the other ranks compute the padded step.
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
        """The sizes that can be replayed, ascending."""
        return sorted(self._recordings)

    def pending(self) -> list[int]:
        """Return the sizes that are not captured yet, from large to small.

        In this order, small sizes find memory in the pool.
        """
        return [
            size
            for size in reversed(self.sizes)
            if size not in self._recordings and size not in self.stats.disabled
        ]

    def capture(self, size: int) -> bool:
        """Record a size and check it. If that fails, disable the size, log why and return False."""
        began = time.perf_counter()
        recorder = Recorder(self._platform, self._pool, self._stream)
        with torch.no_grad(), self._quiet_gc():
            failure = self._attempt(self._record, size, recorder)
            if failure is None and self._eager is not None:
                failure = self._attempt(self._check, size)
        if failure is not None:
            recorder.abandon()
            self._disable(size, failure)
            return False
        self.stats.num_graphs += self._recordings[size].num_graphs
        self.stats.graph_bytes = self._bytes_of_earlier_pools + self._platform.graph_bytes(
            self._pool
        )
        self.stats.capture_seconds[size] = time.perf_counter() - began
        return True

    def choose(self, num_tokens: int) -> int | None:
        """Return the captured size to which a step is padded.

        If the step must run eagerly, count the reason and return None.
        """
        size = next((size for size in self.captured if size >= num_tokens), None)
        if size is not None and size <= num_tokens * self._platform.padding_limit:
            return size
        planned = next((size for size in self.sizes if size >= num_tokens), None)
        if planned is None:
            reason = Reason.TOO_LONG
        elif planned > num_tokens * self._platform.padding_limit:
            reason = Reason.PADDING
        else:
            reason = self.stats.disabled.get(planned, Reason.NOT_CAPTURED)
        self.stats.fallbacks[reason] += 1
        return None

    def replay(self, size: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Replay a size on `inputs` [T, ...], T <= `size`. Return the first T rows of the output,
        valid until the next replay.

        If the replay fails, disable the size and return None: the step must run eagerly.
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

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> _Failure | None:
        """Do the work. Return its failure, on this or another rank, or None."""
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
            # The first run of a size chooses kernels and allocates workspaces outside of the graph.
            with self._platform.on_stream(self._stream):
                self._forward(*static)
            self._platform.synchronize()
            self._recordings[size] = self._forward.record(static, recorder)
            self._platform.synchronize()

    def _check(self, size: int) -> None:
        """Replay the size on other tokens than it was captured with, and compare the results.

        Raise `CaptureError` if they differ.
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
        # Use a new pool for the next captures. torch refuses a pool whose graphs are all gone, and
        # a pool that a failed capture left recording, without a way to ask for either.
        self._platform.abandon_graph_pool(self._pool)
        self._bytes_of_earlier_pools = self.stats.graph_bytes if self._recordings else 0
        self._pool = self._platform.graph_pool()
        if failure.reason is Reason.OUT_OF_MEMORY:
            gc.collect()
            self._platform.empty_cache()

    @contextmanager
    def _quiet_gc(self) -> Iterator[None]:
        """Prevent garbage collection during a capture, which could free memory of a graph.

        After the first capture, freeze all live objects, so that later collections skip them.
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
    """Compare a traced forward with its model on `size` made-up tokens. Yield before each forward.

    Both call the same kernels in the same order, so the results are equal, except for
    nondeterministic kernels. The trace has plain torch ops or the device's own ops, so one of the
    two eager results must match. `agree` is that of `Graphs`. Raise `CaptureError` if none matches.
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
    """A replay, or the forward in pieces, differs from eager."""


class _Failure(NamedTuple):
    """Why a size is disabled, and the error."""

    reason: Reason
    text: str


def _row_distance(actual: torch.Tensor, expected: torch.Tensor, quantile: float) -> float:
    """Return a quantile of the distances of rows [T, H], relative to the lengths of `expected`.

    Return NaN if any row has a NaN.
    """
    actual, expected = actual.float(), expected.float()
    distance = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    share: float = distance.quantile(quantile).item()
    return share


def _sum_up(error: BaseException) -> str:
    """Return the error and where it happened, in one line."""
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return ", ".join([*getattr(error, "__notes__", []), first_line])
