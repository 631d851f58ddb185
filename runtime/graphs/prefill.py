"""Runs prefills and mixed steps: padded to a captured size, at their own length in pieces, or
eagerly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...compilation.by_length import ForwardByLength
from ...compilation.capture import Agree, Graphs, Reason, check_forward
from ...compilation.histogram import LengthHistogram
from ...compilation.piecewise import PiecewiseForward
from ...compilation.self_check import CHECKED_TOKENS, check_pieces, traced_piece
from ...compilation.sizes import FLAG, choose_sizes, parse_sizes, within_budget
from ...compilation.whole import BreakableForward
from ...kernels.platform.graph_capture import GraphCapture
from ..config.resolved import ResolvedConfig
from ..core.engine_info import PieceCalls
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from .dummy_batch import dummy_adapters, dummy_prefill

logger = logging.getLogger(__name__)


class PrefillGraph:
    """A model's forward: eager until `use`, then in pieces or recorded with breaks.

    If a graph fails, steps run without it. `seen` are the lengths of earlier steps, from which
    auto:K chooses sizes. `agree` is that of `Graphs`. With `adapters`, the forward is one that adds
    their updates.
    """

    def __init__(
        self,
        model: nn.Module,
        platform: GraphCapture,
        config: ResolvedConfig,
        attention: PagedAttention,
        seen: LengthHistogram,
        agree: Agree | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        self._agree, self._adapters = agree, adapters
        self._model, self._platform, self._config = model, platform, config
        self._attention, self._seen = attention, seen
        self._forward: PiecewiseForward | ForwardByLength | BreakableForward | None = None
        self._eager_reason = Reason.STARTING
        self._eager_steps: Counter[Reason] = Counter()
        self.graphs: Graphs | None = None
        self.piecewise_steps = 0

    @property
    def pieces(self) -> tuple[PiecewiseForward, ...]:
        """The forward in pieces, or the two forwards for short and long steps. Empty if steps do
        not run in pieces.
        """
        if isinstance(self._forward, PiecewiseForward | ForwardByLength):
            return self._forward.parts
        return ()

    @property
    def num_pieces(self) -> int:
        """Number of distinct pieces. 0 while steps are eager."""
        return sum(len(part.plan.pieces) for part in self.pieces)

    def calls(self) -> list[PieceCalls]:
        """Return the calls of a short step, in order."""
        return [
            PieceCalls(
                piece=piece,
                op=op,
                times=times,
                kinds=0 if piece is None else len({*part.plan.pieces[piece].ops}),
            )
            for part in self.pieces[:1]
            for piece, op, times in part.plan.stretches()
        ]

    def passes(self) -> dict[str, int]:
        """Return how often each pass matched. Of two forwards, take the larger number."""
        found: dict[str, int] = {}
        for part in self.pieces:
            for name, count in part.plan.passes.items():
                found[name] = max(count, found.get(name, 0))
        return found

    def passes_off(self) -> dict[str, str]:
        """Return why passes did not run, for those that ran on no forward."""
        ran = self.passes()
        return {
            name: reason
            for part in self.pieces
            for name, reason in part.plan.passes_off.items()
            if name not in ran
        }

    @property
    def fallbacks(self) -> Counter[Reason]:
        """Number of steps that ran without a graph although graphs are enabled, by reason."""
        return (
            self._eager_steps + self.graphs.stats.fallbacks
            if self.graphs is not None
            else self._eager_steps
        )

    def check(self, forward: PiecewiseForward | ForwardByLength) -> Iterator[bool]:
        """Compare each traced part with the model, then each piece with its traced code.

        Yield before each run whether it is a long one. Raise `CaptureError` if results differ.
        """
        page_size = self._attention.pool.page_size
        for part in forward.parts:
            if all(piece.traced for piece in part.plan.pieces):
                traced = part.with_pieces([traced_piece(piece) for piece in part.plan.pieces])
                sizes = part.plan.good_for(CHECKED_TOKENS)
                runs = check_forward(traced, self._model, self._dummy_step, sizes, self._agree)
                yield from (False for _ in runs)
            yield from check_pieces(
                part,
                lambda size: dummy_prefill(size, 1, self._platform, page_size)[:2],
                self._config.chunked_prefill_size,
                self._platform.is_out_of_memory,
            )

    def use(
        self,
        forward: PiecewiseForward | ForwardByLength | BreakableForward,
        other_graphs: int = 0,
    ) -> None:
        """Run steps by `forward` from now on. Call `capture_next` to capture its sizes.

        `other_graphs` is the number of graphs of other phases.
        """
        self._forward = forward
        graphs_per_size = len(self._attention.pool.layouts) + 1
        if self.pieces:
            graphs_per_size = max(sum(part.plan.calls().values()) for part in self.pieces)
        sizes = self._sizes(graphs_per_size, other_graphs)
        if isinstance(forward, ForwardByLength):
            sizes = sorted({forward.recordable(size) for size in sizes})
        if sizes:
            buffers = [
                torch.zeros(sizes[-1], dtype=torch.int64, device=self._platform.device())
                for _ in range(2)
            ]
            self.graphs = Graphs(
                forward,
                self._platform,
                buffers=buffers,
                sizes=sizes,
                dummy_step=self._dummy_step,
                eager=self._model,
                debug=self._config.debug_cuda_graph,
                agree=self._agree,
            )

    def give_up(self, reason: Reason) -> None:
        """Keep steps eager, for this reason, until `use`."""
        self._eager_reason = reason

    def capture_next(self) -> bool:
        """Capture the most useful pending size. Return False if none is pending."""
        pending = self.graphs.pending() if self.graphs is not None else []
        if self.graphs is None or not pending:
            return False
        # The largest size first, so that the others find memory in the pool. Then the sizes to
        # which most of the seen steps would have been padded.
        size, sizes = pending[0], self.graphs.sizes
        if self.graphs.captured:
            used = Counter[int]()
            for length, count in self._seen.counts.items():
                used.update(dict.fromkeys(sizes[bisect_left(sizes, length) :][:1], count))
            size = max(pending, key=used.__getitem__)
        self.graphs.capture(size)
        return True

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step. The caller sets the forward context."""
        if self._forward is None:
            self._eager_steps[self._eager_reason] += 1
            eager: torch.Tensor = self._model(input_ids, positions)
            return eager
        self.piecewise_steps += bool(self.pieces)
        if self.graphs is not None:
            size = self.graphs.choose(input_ids.shape[0])
            hidden = None if size is None else self.graphs.replay(size, [input_ids, positions])
            if hidden is not None:
                return hidden
        return self._forward(input_ids, positions)

    def _sizes(self, graphs_per_size: int, other_graphs: int) -> list[int]:
        """Return the sizes to capture. Without real graphs that is none, unless the flag gives
        sizes.
        """
        option = parse_sizes(self._config.piecewise_cuda_graph_tokens)
        if not self._platform.graphs_are_real and option == (None, None):
            return []
        cap = self._config.piecewise_cuda_graph_max_tokens
        sizes = choose_sizes(option, cap, self._seen.counts)
        budget = self._platform.graph_budget
        if budget is not None and self._config.uses_lora:
            # Steps with adapters, and steps without them, have graphs of their own.
            budget //= 2
        kept = within_budget(
            sizes, graphs_per_size, None if budget is None else budget - other_graphs
        )
        if len(kept) < len(sizes):
            logger.warning(
                "%d of %d sizes are captured: the device holds %d graphs, a size takes %d; choose "
                "others with %s",
                len(kept),
                len(sizes),
                budget,
                graphs_per_size,
                FLAG,
            )
        return kept

    @contextmanager
    def _dummy_step(self, size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
        batch = dummy_prefill(size, seed, self._platform, self._attention.pool.page_size)
        with self._attention.step(batch.metadata), dummy_adapters(self._adapters, size):
            yield [batch.input_ids, batch.positions]
