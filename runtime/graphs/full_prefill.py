"""Full graphs of prefills: the whole forward, attention included, recorded for each number of
tokens.

Attention computes each token of a step as a decode of its own, because only the launches of decodes
do not depend on lengths. A step is therefore one launch, but keys and values are read once per
token, which pays for short steps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ...compilation.capture import Agree
from ...compilation.histogram import LengthHistogram
from ...compilation.sizes import choose_sizes, parse_sizes
from ...kernels.platform.graph_capture import GraphCapture
from ..config.resolved import ResolvedConfig
from ..core.batch import Batch
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from .decode import DecodeGraph
from .dummy_batch import dummy_adapters, dummy_prefill
from .rows_apart import rows_apart


class FullPrefillGraph(DecodeGraph):
    """Full graphs by number of tokens. A step that none fits runs eagerly."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        platform: GraphCapture,
        config: ResolvedConfig,
        attention: PagedAttention,
        seen: LengthHistogram,
        agree: Agree | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        cap = config.piecewise_cuda_graph_max_tokens
        option = parse_sizes(config.piecewise_cuda_graph_tokens)
        super().__init__(
            forward,
            forward,
            platform,
            config,
            attention,
            agree,
            sizes=choose_sizes(option, cap, seen.counts),
            phase="prefill",
            adapters=adapters,
        )

    def takes(self, batch: Batch) -> bool:
        """Whether a graph may run the step."""
        return batch.num_tokens <= self.graphs.sizes[-1]

    @contextmanager
    def _dummy_batch(self, size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
        batch = dummy_prefill(size, seed, self._platform, self._attention.pool.page_size)
        self._dummy = batch.metadata
        apart = rows_apart(batch.metadata)
        with self._in_place(apart, size), dummy_adapters(self._adapters, size):
            yield [batch.input_ids, batch.positions]
