"""The graphs of steps that all have adapters (LoRA), or all have none."""

from __future__ import annotations

import torch
from torch import nn

from ...compilation.by_length import ForwardByLength
from ...compilation.capture import Agree, Graphs
from ...compilation.histogram import LengthHistogram
from ...compilation.piecewise import PiecewiseForward
from ...compilation.whole import BreakableForward
from ...kernels.platform.platform import Platform
from ..config.engine import Backend
from ..config.resolved import ResolvedConfig
from ..core.batch import Batch
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from .decode import DecodeGraph, batch_sizes
from .full_prefill import FullPrefillGraph
from .prefill import PrefillGraph


class StepGraphs:
    """Runs steps by a graph, or eagerly if none fits.

    With `adapters`, graphs add the updates of adapters. Their slots are read at replay, so a graph
    can be replayed for any mixture. Without `adapters`, graphs do no work for adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        platform: Platform,
        config: ResolvedConfig,
        attention: PagedAttention,
        seen: LengthHistogram,
        agree: Agree | None,
        decode_backend: str,
        adapters: StepAdapters | None = None,
    ) -> None:
        self._model, self._platform, self._config = model, platform, config
        self._attention, self._seen, self._agree = attention, seen, agree
        self._decode_backend, self.adapters = decode_backend, adapters
        self.prefill = (
            PrefillGraph(model, platform, config, attention, seen, agree, adapters)
            if config.prefill_backend not in (Backend.DISABLED, Backend.FULL)
            else None
        )
        # Set by `use`.
        self.decode: DecodeGraph | None = None
        self.full: FullPrefillGraph | None = None
        self.prefill_steps = self.prefill_tokens = 0

    def use(self, forward: PiecewiseForward | ForwardByLength | BreakableForward | None) -> None:
        """Run prefills by `forward` and record its decodes. If it is None, use the model's own."""
        others = self._platform, self._config, self._attention
        if self._config.prefill_backend is Backend.FULL:
            self.full = FullPrefillGraph(
                self._model, *others, self._seen, self._agree, self.adapters
            )
        if self.prefill is not None and forward is not None:
            self.prefill.use(
                forward,
                len(batch_sizes(self._config)) if self._decode_backend is Backend.FULL else 0,
            )
        if self._decode_backend is Backend.FULL:
            recorded = (
                forward.parts[0]
                if isinstance(forward, PiecewiseForward | ForwardByLength)
                else self._model
            )
            self.decode = DecodeGraph(
                recorded, self._model, *others, self._agree, adapters=self.adapters
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

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step.

        With `adapters`, the caller sets the slots of the step's tokens.
        """
        hidden = None
        if (
            self.decode is not None
            and batch.images is None
            and (batch.is_decode or self.decode.takes_rows_apart(batch))
        ):
            hidden = self.decode(batch)
        if hidden is not None:
            return hidden
        self._seen.add(batch.num_tokens)
        self.prefill_steps += 1
        self.prefill_tokens += batch.num_tokens
        full = self.full if batch.images is None else None
        hidden = None if full is None else full(batch)
        if hidden is not None:
            return hidden
        with self._attention.step(batch.metadata, batch.images):
            forward = self.prefill or self._model
            result: torch.Tensor = forward(batch.input_ids, batch.turns)
        return result

    @property
    def prefill_graphs(self) -> Graphs | None:
        """The graphs of prefills, if there are any."""
        phase = self.full or self.prefill
        return None if phase is None else phase.graphs

    def phases(self) -> list[Graphs]:
        """Return the graphs of decodes and of prefills, if they are used."""
        found = [None if self.decode is None else self.decode.graphs, self.prefill_graphs]
        return [graphs for graphs in found if graphs is not None]
