"""Chooses the graph of a step: a full graph if all requests decode, otherwise one of prefills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...compilation.by_length import ForwardByLength
from ...compilation.capture import Graphs, Reason
from ...compilation.histogram import LengthHistogram
from ...compilation.piecewise import PiecewiseForward
from ...compilation.whole import BreakableForward
from ...kernels.attention import GraphAttention
from ...kernels.platform.platform import Platform
from ...kernels.step_parts import StepCall
from ..config.engine import Backend
from ..config.resolved import ResolvedConfig
from ..core.batch import Batch
from ..core.engine_info import GraphInfo
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from ..distributed.ranks import ALONE, Ranks
from ..sampling.sampler import draws_of
from .rows_apart import rows_apart, some_rows
from .step_graphs import StepGraphs

_MANY_ROWS = 128  # Rows of a decode up to which a device waits for its memory.


class GraphCounts(NamedTuple):
    """How many steps ran in pieces, how many were replays of a captured size, how many tokens of
    padding these had, and how many steps ran without a graph, by reason.

    `prefill_...` count the steps that are neither full graphs of decodes nor native calls, their
    tokens, and those of both that were replayed.
    """

    piecewise_steps: int = 0
    replays: int = 0
    padded_tokens: int = 0
    fallbacks: Mapping[str, int] = {}
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_replays: int = 0
    prefill_replayed_tokens: int = 0


class GraphRunner:
    """Runs the steps of one model, eagerly if no graph fits.

    `seen` collects the lengths of steps that no decode graph runs. `adapters` tells the model's
    layers which adapters the tokens of a step have. Raise `ValueError` if the device
    does not support a setting.

    Attributes:
        base, adapted: The graphs of steps without and with adapters. `adapted` is None if adapters
            are off. `kinds` lists both.
    """

    def __init__(
        self,
        model: nn.Module,
        platform: Platform,
        config: ResolvedConfig,
        attention: PagedAttention,
        seen: LengthHistogram,
        ranks: Ranks = ALONE,
        adapters: StepAdapters | None = None,
    ) -> None:
        agree = (lambda done: ranks.minimum(done) == 1) if ranks.size > 1 else None
        self._config = config
        self.prefill_backend = config.prefill_backend
        able = isinstance(attention.backend, GraphAttention) and all(
            # The tokens that a query sees are chosen on the host, outside of graphs.
            layout.selected is None
            for layout in attention.pool.layouts
        )
        self.decode_backend = config.decode_backend or (
            Backend.FULL if able and platform.graphs_are_real else Backend.NATIVE
        )
        if self.decode_backend is Backend.FULL and not able:
            raise ValueError(
                "--cuda-graph-backend-decode full needs an attention backend whose decodes can be "
                "recorded, and a model without sparse attention: take disabled"
            )
        if (
            self.prefill_backend in (Backend.BREAKABLE, Backend.FULL)
            and not platform.graphs_are_real
        ):
            raise ValueError(
                f"--cuda-graph-backend-prefill {self.prefill_backend} needs a device that records "
                f"graphs, which {platform.device_type} does not: take piecewise"
            )
        if self.prefill_backend is Backend.FULL and not (able and attention.states is None):
            raise ValueError(
                "--cuda-graph-backend-prefill full needs an attention backend whose decodes can be "
                "recorded, and a model without sparse attention and recurrent states: take "
                "piecewise"
            )
        self.kernels = None
        if self.decode_backend is Backend.NATIVE:
            pool, backend = attention.pool, attention.backend
            # The layers of a draft head follow those of the model.
            own = slice(sum(hasattr(each, "kv_layout") for each in model.modules()))
            self.kernels = platform.step_kernels(
                model, backend, pool.layouts[own], pool.k[own], pool.v[own], pool.second[own]
            )
        if self.decode_backend is Backend.NATIVE and self.kernels is None:
            if config.decode_backend is Backend.NATIVE:
                raise ValueError(
                    "--cuda-graph-backend-decode native needs a bfloat16 model, "
                    "--attention-backend native, a CPU that the kernels can be built for, and "
                    "ranks that share its memory: take disabled"
                )
            self.decode_backend = Backend.DISABLED
        common = model, platform, config, attention, seen, agree, self.decode_backend
        self.base = StepGraphs(*common)
        self.adapted = None if adapters is None else StepGraphs(*common, adapters)
        self.kinds = [kind for kind in (self.base, self.adapted) if kind is not None]
        # The product of an unpacked head may depend on the batch.
        if config.batch_invariant and not (
            self.kernels and model.lm_head.layout is not None and platform.make_batch_invariant()
        ):
            raise ValueError(
                "--batch-invariant needs native decodes: a CPU that the kernels can be built for, "
                "a bfloat16 model whose layers and head they know, and no --disable-cuda-graph"
            )

    def use(self, *forwards: PiecewiseForward | ForwardByLength | BreakableForward | None) -> None:
        """Run the prefills of each kind of steps by a forward, and record its decodes.

        If a forward is None, use the model's own.
        """
        for graphs, forward in zip(self.kinds, forwards, strict=True):
            graphs.use(forward)

    def capture_next(self) -> bool:
        """Capture one size, of steps without adapters first. Return False if no size is pending."""
        return any(graphs.capture_next() for graphs in self.kinds)

    @property
    def most_rows(self) -> int:
        """Number of rows of a step up to which a few more rows cost little."""
        return _MANY_ROWS if self.kernels is None else self.kernels.max_tokens

    @property
    def prefill_sizes(self) -> list[int]:
        """Numbers of tokens for which prefills without adapters are captured, ascending."""
        graphs = self.base.prefill_graphs
        return [] if graphs is None else graphs.captured

    @property
    def num_pending(self) -> int:
        """Number of sizes that are not captured yet."""
        return sum(len(graphs.pending()) for graphs in self.phases())

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step."""
        if self._config.batch_invariant:
            return self._each_token(batch)
        call = self._call(batch)
        if call is not None:
            return call.hidden()
        if batch.adapter_slots is None:
            return self.base(batch)
        assert self.adapted is not None and self.adapted.adapters is not None
        with self.adapted.adapters.using(batch.adapter_slots):
            return self.adapted(batch)

    def choose(self, batch: Batch) -> list[int] | None:
        """Compute a step and choose the tokens [N] of its samplers in one native call.

        A token is `NO_TOKEN` if its logits are not finite. Return None, and compute nothing, if the
        step cannot be computed that way.
        """
        call = self._call(batch)
        return None if call is None else call.tokens()

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Compute a step and its logits [N, V] float32 in one native call, or return None."""
        call = self._call(batch)
        return None if call is None else call.logits()

    def _call(self, batch: Batch) -> StepCall | None:
        """Return the native call that computes a small step, made once per batch, or None."""
        kernels = self.kernels
        if batch.call is not None or kernels is None or self._config.batch_invariant:
            return batch.call
        # A repeated prompt may be a shorter step, and its text must not change.
        is_free = kernels.keeps_bits or batch.has_decodes
        if batch.num_tokens > kernels.max_tokens or not is_free or batch.images is not None:
            return None
        # The sampling of a request is the same for all of its tokens.
        draws = draws_of(batch.samplers) if batch.asks_no_more else None
        step = batch.input_ids, batch.positions, batch.metadata, batch.sample_rows
        batch.call = kernels.call(*step, draws, batch.adapter_slots, batch.turns)
        return batch.call

    def _each_token(self, batch: Batch) -> torch.Tensor:
        """Compute a step by native calls in which each token is a request of its own."""
        assert self.kernels is not None
        most, apart = self.kernels.max_tokens, rows_apart(batch.metadata)
        hidden = []
        for begin in range(0, batch.num_tokens, most):
            rows = slice(begin, begin + most)
            metadata = some_rows(apart, begin, begin + most)
            adapters = None if batch.adapter_slots is None else batch.adapter_slots[rows]
            step = batch.input_ids[rows], batch.positions[rows], metadata
            call = self.kernels.call(*step, adapters=adapters)
            hidden.append(call.hidden())
        return torch.cat(hidden)

    def counts(self) -> GraphCounts:
        """Return the counts of all steps so far."""
        stats = [graphs.stats for graphs in self.phases()]
        fallbacks, prefills = Counter[Reason](), []
        for kind in self.kinds:
            if kind.decode is not None:
                fallbacks += kind.decode.graphs.stats.fallbacks
            if kind.prefill is not None:
                fallbacks += kind.prefill.fallbacks
            if kind.full is not None:
                fallbacks += kind.full.graphs.stats.fallbacks
            if kind.prefill_graphs is not None:
                prefills.append(kind.prefill_graphs.stats)
        return GraphCounts(
            sum(kind.prefill.piecewise_steps for kind in self.kinds if kind.prefill is not None),
            sum(stat.replays for stat in stats),
            sum(stat.padded_tokens for stat in stats),
            {reason.value: count for reason, count in fallbacks.items()},
            sum(kind.prefill_steps for kind in self.kinds),
            sum(kind.prefill_tokens for kind in self.kinds),
            sum(stat.replays for stat in prefills),
            sum(stat.replayed_tokens for stat in prefills),
        )

    def info(self) -> GraphInfo:
        """Describe the graphs: which are captured, pending or failed.

        Sizes, pieces and passes are those of steps without adapters.
        """
        own, prefill = self.base, self.base.prefill_graphs
        decode = own.decode.graphs if own.decode is not None else None
        stats = [graphs.stats for graphs in self.phases()]
        return GraphInfo(
            prefill_backend=self.prefill_backend,
            decode_backend=self.decode_backend,
            distinct_pieces=own.prefill.num_pieces if own.prefill is not None else 0,
            prefill_sizes=prefill.captured if prefill is not None else [],
            decode_sizes=decode.captured if decode is not None else [],
            failed_sizes={
                str(size): reason.value for stat in stats for size, reason in stat.disabled.items()
            },
            pending_sizes=[size for graphs in self.phases() for size in graphs.pending()],
            calls=own.prefill.calls() if own.prefill is not None else [],
            passes=own.prefill.passes() if own.prefill is not None else {},
            passes_off=own.prefill.passes_off() if own.prefill is not None else {},
            num_graphs=sum(stat.num_graphs for stat in stats),
            graph_bytes=sum(stat.graph_bytes for stat in stats),
            capture_seconds=sum(sum(stat.capture_seconds.values()) for stat in stats),
        )

    def phases(self) -> list[Graphs]:
        """Return the graphs of decodes and of prefills, of all kinds of steps."""
        return [graphs for kind in self.kinds for graphs in kind.phases()]
