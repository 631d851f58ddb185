"""Which graphs run a step: full ones for steps of nothing but decodes, those of the prefill phase
for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from ...compilation.by_length import ForwardByLength
from ...compilation.capture import Graphs, Reason
from ...compilation.histogram import LengthHistogram
from ...compilation.piecewise import PiecewiseForward
from ...compilation.whole import BreakableForward
from ...kernels.attention import AttentionMetadata, GraphAttention
from ...kernels.platform import Platform
from ...kernels.step_parts import StepCall
from ..config.engine import Backend, ResolvedConfig
from ..core.batch import Batch
from ..core.engine_info import GraphInfo
from ..core.forward_context import PagedAttention
from ..distributed.ranks import ALONE, Ranks
from ..sampling.sampler import draws_of
from .decode import DecodeGraph, batch_sizes
from .prefill import PrefillGraph


class GraphCounts(NamedTuple):
    """How steps ran: in pieces, by replaying a captured size, or without a graph and why; and the
    tokens added to reach a size.
    """

    piecewise_steps: int = 0
    replays: int = 0
    padded_tokens: int = 0
    fallbacks: Mapping[str, int] = {}


class GraphRunner:
    """Runs the steps of one model, eagerly where neither phase has a graph. Raises `ValueError` for
    what the device cannot do.

    `seen`: the lengths of steps; those that no decode graph runs are added to it.
    """

    def __init__(
        self,
        model: nn.Module,
        platform: Platform,
        config: ResolvedConfig,
        attention: PagedAttention,
        seen: LengthHistogram,
        ranks: Ranks = ALONE,
    ) -> None:
        self._agree = (lambda done: ranks.least(done) == 1) if ranks.size > 1 else None
        self._model, self._platform, self._config = model, platform, config
        self._attention, self._seen = attention, seen
        self.prefill_backend = config.prefill_backend
        able = isinstance(attention.backend, GraphAttention) and all(
            # What its queries see is chosen on the host's side of a graph.
            layout.selected is None
            for layout in attention.pool.layouts
        )
        self.decode_backend = config.decode_backend or (
            Backend.FULL if able and platform.graphs_are_real else Backend.NATIVE
        )
        if self.decode_backend is Backend.FULL and not able:
            raise ValueError(
                "--cuda-graph-backend-decode full needs an attention backend whose decodes can be "
                "recorded, and a model that does not choose what its queries see: take disabled"
            )
        if self.prefill_backend is Backend.BREAKABLE and not platform.graphs_are_real:
            raise ValueError(
                "--cuda-graph-backend-prefill breakable needs a device that records graphs, "
                f"which {platform.device_type} does not: take piecewise"
            )
        self.prefill = (
            PrefillGraph(model, platform, config, attention, seen, self._agree)
            if self.prefill_backend is not Backend.DISABLED
            else None
        )
        self.decode: DecodeGraph | None = None
        """None also before `use`."""
        self.kernels = None
        if self.decode_backend is Backend.NATIVE:
            pool = attention.pool
            self.kernels = platform.step_kernels(
                model, attention.backend, pool.layouts, pool.k, pool.v, pool.second
            )
        if self.decode_backend is Backend.NATIVE and self.kernels is None:
            if config.decode_backend is Backend.NATIVE:
                raise ValueError(
                    "--cuda-graph-backend-decode native needs a bfloat16 model, "
                    "--attention-backend native, a CPU that the kernels can be built for, and "
                    "ranks that share its memory: take disabled"
                )
            self.decode_backend = Backend.DISABLED
        # A head that is not packed is multiplied by what does not promise as much.
        if config.batch_invariant and not (
            self.kernels and model.lm_head.layout is not None and platform.make_batch_invariant()
        ):
            raise ValueError(
                "--batch-invariant needs native decodes: a CPU that the kernels can be built for, "
                "a bfloat16 model whose layers and head they know, and no --disable-cuda-graph"
            )

    def use(self, forward: PiecewiseForward | ForwardByLength | BreakableForward | None) -> None:
        """Run prefills through `forward` and record decodes of it; None: both of the model as it
        is.
        """
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
        """Capture one size, decodes' first: most steps are theirs. False where none is pending."""
        return any(
            phase.capture_next() for phase in (self.decode, self.prefill) if phase is not None
        )

    @property
    def num_pending(self) -> int:
        """How many sizes are still to be captured."""
        return sum(len(graphs.pending()) for graphs in self.phases())

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of a step."""
        if self._config.batch_invariant:
            return self._each_token(batch)
        hidden = self.decode(batch) if self.decode is not None and batch.is_decode else None
        if hidden is not None:
            return hidden
        call = self._call(batch)
        if call is not None:
            return call.hidden()
        self._seen.add(batch.num_tokens)
        with self._attention.step(batch.metadata):
            forward = self.prefill or self._model
            result: torch.Tensor = forward(batch.input_ids, batch.positions)
        return result

    def choose(self, batch: Batch) -> list[int] | None:
        """The tokens [N] of a step's samplers, of which no more is asked, `NO_TOKEN` where logits
        are not finite, if they are found with the forward; None: nothing is done.
        """
        call = self._call(batch)
        return None if call is None else call.tokens()

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Their logits [N, V] float32 likewise."""
        call = self._call(batch)
        return None if call is None else call.logits()

    def _call(self, batch: Batch) -> StepCall | None:
        """What computes a small step whole, made once for a batch; None: nothing does."""
        kernels = self.kernels
        if batch.call is not None or kernels is None or self._config.batch_invariant:
            return batch.call
        # A repeated prompt may be a shorter step, whose text must not change by that.
        is_free = kernels.keeps_bits or batch.has_decodes
        if batch.num_tokens > kernels.max_tokens or not is_free:
            return None
        # A request asks the same for all of its tokens.
        draws = draws_of(batch.samplers) if batch.asks_no_more else None
        step = batch.input_ids, batch.positions, batch.metadata, batch.sample_rows
        batch.call = kernels.call(*step, draws)
        return batch.call

    def _each_token(self, batch: Batch) -> torch.Tensor:
        """The step in native ones, to which each token is a request of its own."""
        assert self.kernels is not None
        most = self.kernels.max_tokens
        lens = torch.tensor(batch.metadata.query_lens)
        owners = torch.arange(len(lens)).repeat_interleave(lens)
        hidden = []
        for begin in range(0, batch.num_tokens, most):
            rows = slice(begin, begin + most)
            positions = batch.positions[rows]
            alone = _alone(batch.metadata, positions, owners[rows], rows)
            hidden.append(self.kernels.call(batch.input_ids[rows], positions, alone).hidden())
        return torch.cat(hidden)

    def counts(self) -> GraphCounts:
        """Of all steps so far."""
        stats = [graphs.stats for graphs in self.phases()]
        fallbacks = Counter[Reason]()
        if self.decode is not None:
            fallbacks += self.decode.graphs.stats.fallbacks
        if self.prefill is not None:
            fallbacks += self.prefill.fallbacks
        return GraphCounts(
            self.prefill.piecewise_steps if self.prefill is not None else 0,
            sum(stat.replays for stat in stats),
            sum(stat.padded_tokens for stat in stats),
            {reason.value: count for reason, count in fallbacks.items()},
        )

    def info(self) -> GraphInfo:
        """What is planned and what is there."""
        prefill = self.prefill.graphs if self.prefill is not None else None
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
            num_graphs=sum(stat.num_graphs for stat in stats),
            graph_bytes=sum(stat.graph_bytes for stat in stats),
            capture_seconds=sum(sum(stat.capture_seconds.values()) for stat in stats),
        )

    def phases(self) -> list[Graphs]:
        """The graphs of decodes and of prefills, as far as they are used."""
        found = [phase.graphs for phase in (self.decode, self.prefill) if phase is not None]
        return [graphs for graphs in found if graphs is not None]


def _alone(
    metadata: AttentionMetadata, positions: torch.Tensor, owners: torch.Tensor, rows: slice
) -> AttentionMetadata:
    """Some rows of a step, each a request of its own; `owners`: whose they are."""
    window = metadata.window
    return replace(
        metadata,
        query_lens=[1] * len(positions),
        seq_lens=(positions + 1).tolist(),
        block_table=metadata.block_table[owners],
        slot_mapping=metadata.slot_mapping[rows],
        window=None if window is None else _alone(window, positions, owners, rows),
    )
