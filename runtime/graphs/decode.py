"""Full graphs of decodes: the whole forward, attention included, recorded for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ...compilation.capture import Agree, Graphs
from ...compilation.sizes import decode_sizes, parse_list
from ...compilation.whole import FullForward
from ...kernels.attention import AttentionMetadata, GraphAttention, HostPlan
from ...kernels.platform.graph_capture import GraphCapture
from ...kernels.state import StateMetadata
from ..config.engine import BATCH_SIZES, BATCH_SIZES_FLAG
from ..config.resolved import ResolvedConfig
from ..core.batch import Batch
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from .dummy_batch import dummy_adapters, dummy_decode
from .rows_apart import rows_apart


class DecodeGraph:
    """Full graphs by batch size.

    Each step writes its metadata in place, into a plan of the attention backend that graphs read.
    `forward` is recorded, and compared with `eager`. `agree` is that of `Graphs`. If a graph fails,
    steps run without it.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        eager: Callable[..., torch.Tensor],
        platform: GraphCapture,
        config: ResolvedConfig,
        attention: PagedAttention,
        agree: Agree | None = None,
        *,
        sizes: list[int] | None = None,
        phase: str = "decode",
        adapters: StepAdapters | None = None,
    ) -> None:
        """`sizes` are the rows of steps to capture. None: those of `batch_sizes`. With `adapters`,
        `forward` adds their updates.
        """
        self._adapters = adapters
        assert isinstance(attention.backend, GraphAttention)
        sizes = sizes or batch_sizes(config)
        self._eager, self._platform, self._attention, self._backend = (
            eager,
            platform,
            attention,
            attention.backend,
        )
        self._dummy: AttentionMetadata | None = None
        self._state_slots: torch.Tensor | None = None
        if attention.states is not None:
            self._state_slots = torch.zeros(sizes[-1], dtype=torch.int64, device=platform.device())
        pages = -(-config.context_length // attention.pool.page_size)
        figures = sizes[-1], pages, attention.pool.page_size, platform.device()
        self._plan = self._backend.capture_plan(*figures)
        self._window_plan = (
            self._backend.capture_plan(*figures) if any(attention.pool.second) else None
        )
        self.graphs = Graphs(
            FullForward(
                forward, self._plan.host_arguments if isinstance(self._plan, HostPlan) else None
            ),
            platform,
            buffers=[
                torch.zeros(sizes[-1], dtype=torch.int64, device=platform.device())
                for _ in range(2)
            ],
            sizes=sizes,
            dummy_step=self._dummy_batch,
            eager=self._checked_against,
            phase=phase,
            debug=config.debug_cuda_graph,
            agree=agree,
        )

    def capture_next(self) -> bool:
        """Capture the largest pending batch size. Return False if none is pending."""
        pending = self.graphs.pending()
        if pending:
            self.graphs.capture(pending[0])
        return bool(pending)

    def takes_rows_apart(self, batch: Batch) -> bool:
        """Whether the rows of a step can be decodes of their own.

        These are steps with proposals, or with tokens that a grammar forced.
        """
        return (
            batch.num_tokens <= self.graphs.sizes[-1]
            and self._state_slots is None
            and all(each.num_computed >= each.num_prompt for each, _ in batch.scheduled)
        )

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Return the hidden states [B, hidden] of B decodes, or None if no graph can run them."""
        size = self.graphs.choose(batch.num_tokens)
        if size is None:
            return None
        metadata = batch.metadata if batch.is_decode else rows_apart(batch.metadata)
        # A graph that is not real calls the forward at each replay, which reads the context.
        with self._in_place(metadata, size):
            return self.graphs.replay(size, [batch.input_ids, batch.turns])

    @contextmanager
    def _dummy_batch(self, size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
        batch = dummy_decode(size, seed, self._platform, self._attention.pool.page_size)
        self._dummy = batch.metadata
        with self._in_place(batch.metadata, size), dummy_adapters(self._adapters, size):
            yield [batch.input_ids, batch.positions]

    def _in_place(self, metadata: AttentionMetadata, size: int) -> AbstractContextManager[None]:
        """Write the metadata of a step of `size` rows in place, and return its context."""
        self._backend.update_plan(self._plan, metadata, size)
        if self._window_plan is not None:
            assert metadata.window is not None
            self._backend.update_plan(self._window_plan, metadata.window, size)
        states = None
        if self._state_slots is not None and metadata.state_slots is not None:
            self._state_slots.zero_()
            self._state_slots[: len(metadata.state_slots)] = metadata.state_slots
            states = StateMetadata(query_lens=[1] * size, slots=self._state_slots[:size])
        return self._attention.planned(self._plan, states, window_plan=self._window_plan)

    def _checked_against(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the dummy batch eagerly, with a plan made from its metadata, not the one in
        place.
        """
        assert self._dummy is not None
        with self._attention.step(self._dummy):
            return self._eager(input_ids, positions)


def batch_sizes(config: ResolvedConfig) -> list[int]:
    """Return the batch sizes to capture: those of the flag, or the default ones, up to the largest
    batch.
    """
    cap = config.cuda_graph_max_bs
    if config.cuda_graph_bs is None:
        return decode_sizes(cap)
    given = [
        size
        for size in parse_list(config.cuda_graph_bs, BATCH_SIZES_FLAG, BATCH_SIZES)
        if size <= cap
    ]
    return given or [cap]
