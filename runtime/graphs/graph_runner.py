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
from .decode import DecodeGraph, batch_sizes
from .full_prefill import FullPrefillGraph
from .prefill import PrefillGraph
from .rows_apart import rows_apart, some_rows

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
        self._adapters = adapters
        self._agree = (lambda done: ranks.minimum(done) == 1) if ranks.size > 1 else None
        self._model, self._platform, self._config = model, platform, config
        self._attention, self._seen = attention, seen
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
        self.prefill = (
            PrefillGraph(model, platform, config, attention, seen, self._agree)
            if self.prefill_backend not in (Backend.DISABLED, Backend.FULL)
            else None
        )
        # Set by `use`.
        self.decode: DecodeGraph | None = None
        self.full: FullPrefillGraph | None = None
        self._prefill_steps = self._prefill_tokens = 0
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
        # The product of an unpacked head may depend on the batch.
        if config.batch_invariant and not (
            self.kernels and model.lm_head.layout is not None and platform.make_batch_invariant()
        ):
            raise ValueError(
                "--batch-invariant needs native decodes: a CPU that the kernels can be built for, "
                "a bfloat16 model whose layers and head they know, and no --disable-cuda-graph"
            )

    def use(self, forward: PiecewiseForward | ForwardByLength | BreakableForward | None) -> None:
        """Run prefills by `forward` and record its decodes. If it is None, use the model's own."""
        if self.prefill_backend is Backend.FULL:
            self.full = FullPrefillGraph(
                self._model,
                self._platform,
                self._config,
                self._attention,
                self._seen,
                self._agree,
            )
        if self.prefill is not None and forward is not None:
            self.prefill.use(
                forward,
                len(batch_sizes(self._config)) if self.decode_backend is Backend.FULL else 0,
            )
        if self.decode_backend is Backend.FULL:
            recorded = (
                forward.parts[0]
                if isinstance(forward, PiecewiseForward | ForwardByLength)
                else self._model
            )
            self.decode = DecodeGraph(
                recorded,
                self._model,
                self._platform,
                self._config,
                self._attention,
                self._agree,
            )

    def capture_next(self) -> bool:
        """Capture one size, of decodes first, because most steps are decodes.

        Return False if no size is pending.
        """
        return any(
            phase.capture_next()
            for phase in (self.decode, self.full, self.prefill)
            if phase is not None
        )

    @property
    def most_rows(self) -> int:
        """Number of rows of a step up to which a few more rows cost little."""
        return _MANY_ROWS if self.kernels is None else self.kernels.max_tokens

    @property
    def num_pending(self) -> int:
        """Number of sizes that are not captured yet."""
        return sum(len(graphs.pending()) for graphs in self.phases())

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step."""
        if self._config.batch_invariant:
            return self._each_token(batch)
        if batch.adapter_slots is not None and self._call(batch) is None:
            assert self._adapters is not None
            step = self._attention.step(batch.metadata, batch.images)
            with self._adapters.using(batch.adapter_slots), step:
                eager: torch.Tensor = self._model(batch.input_ids, batch.turns)
            return eager
        hidden = None
        if (
            self.decode is not None
            and batch.images is None
            and (batch.is_decode or self.decode.takes_rows_apart(batch))
        ):
            hidden = self.decode(batch)
        if hidden is not None:
            return hidden
        call = self._call(batch)
        if call is not None:
            return call.hidden()
        self._seen.add(batch.num_tokens)
        self._prefill_steps += 1
        self._prefill_tokens += batch.num_tokens
        full = self.full if batch.images is None else None
        hidden = None if full is None else full(batch)
        if hidden is not None:
            return hidden
        with self._attention.step(batch.metadata, batch.images):
            forward = self.prefill or self._model
            result: torch.Tensor = forward(batch.input_ids, batch.turns)
        return result

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
        fallbacks = Counter[Reason]()
        if self.decode is not None:
            fallbacks += self.decode.graphs.stats.fallbacks
        if self.prefill is not None:
            fallbacks += self.prefill.fallbacks
        prefill = self._prefill_graphs
        if self.full is not None:
            fallbacks += self.full.graphs.stats.fallbacks
        return GraphCounts(
            self.prefill.piecewise_steps if self.prefill is not None else 0,
            sum(stat.replays for stat in stats),
            sum(stat.padded_tokens for stat in stats),
            {reason.value: count for reason, count in fallbacks.items()},
            self._prefill_steps,
            self._prefill_tokens,
            0 if prefill is None else prefill.stats.replays,
            0 if prefill is None else prefill.stats.replayed_tokens,
        )

    @property
    def _prefill_graphs(self) -> Graphs | None:
        phase = self.full or self.prefill
        return None if phase is None else phase.graphs

    def info(self) -> GraphInfo:
        """Describe the graphs: which are captured, pending or failed."""
        prefill = self._prefill_graphs
        decode = self.decode.graphs if self.decode is not None else None
        stats = [graphs.stats for graphs in self.phases()]
        return GraphInfo(
            prefill_backend=self.prefill_backend,
            decode_backend=self.decode_backend,
            distinct_pieces=self.prefill.num_pieces if self.prefill is not None else 0,
            prefill_sizes=prefill.captured if prefill is not None else [],
            decode_sizes=decode.captured if decode is not None else [],
            failed_sizes={
                str(size): reason.value for stat in stats for size, reason in stat.disabled.items()
            },
            pending_sizes=[size for graphs in self.phases() for size in graphs.pending()],
            calls=self.prefill.calls() if self.prefill is not None else [],
            passes=self.prefill.passes() if self.prefill is not None else {},
            passes_off=self.prefill.passes_off() if self.prefill is not None else {},
            num_graphs=sum(stat.num_graphs for stat in stats),
            graph_bytes=sum(stat.graph_bytes for stat in stats),
            capture_seconds=sum(sum(stat.capture_seconds.values()) for stat in stats),
        )

    def phases(self) -> list[Graphs]:
        """Return the graphs of decodes and of prefills, if they are used."""
        found = [None if self.decode is None else self.decode.graphs, self._prefill_graphs]
        return [graphs for graphs in found if graphs is not None]
