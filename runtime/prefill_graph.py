"""Steps in pieces: the forward cut at attention, each piece compiled, sizes captured as graphs where that pays.

The model is traced and compiled by `compile_process`, beside the serving; here the pieces are loaded, sizes are captured
one at a time, and each step is padded to a captured size, run at its own length in pieces, or run eagerly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import nn

from ..compilation.cache import CompileCache, cache_folder
from ..compilation.capture import Graphs
from ..compilation.compiler import piece_compiler
from ..compilation.install import Installer, Progress
from ..compilation.piecewise import PiecewiseForward
from ..compilation.sizes import choose_sizes, parse_sizes
from ..kernels.attention import AttentionMetadata
from ..kernels.platform import Platform
from .cache.allocator import RESERVED_PAGE
from .config import EngineConfig
from .model_config import ModelConfig

logger = logging.getLogger(__name__)

_TRACE_TOKENS = 64
"""Tokens of the example that is traced; any number above 1 gives the same pieces."""

MakeContext = Callable[[AttentionMetadata], AbstractContextManager[None]]


def installer(config: EngineConfig, platform: Platform, progress: Progress = lambda done, total: None) -> Installer:
    """How this engine's forwards become pieces. Raises `ValueError` that names the flag, or `OSError` of the cache's folder."""
    assert config.chunked_prefill_size is not None
    return Installer(
        platform=platform,
        compiler=piece_compiler(config.piecewise_cuda_graph_compiler, platform),
        cache=CompileCache(cache_folder()),
        max_tokens=max(config.chunked_prefill_size, _TRACE_TOKENS),
        progress=progress,
    )


def install(found: Installer, model: nn.Module, model_config: ModelConfig, dtype: torch.dtype) -> PiecewiseForward:
    """The model's forward in pieces: from the cache where it is there, else traced and compiled into it. Raises `TraceError`."""
    device = found.platform.device()
    example = [torch.arange(_TRACE_TOKENS, device=device), torch.arange(_TRACE_TOKENS, device=device)]
    with torch.no_grad():
        forward, _ = found.install(model, example, model_key=model_key(model_config, dtype))
    return forward


def model_key(model_config: ModelConfig, dtype: torch.dtype) -> str:
    """Text in which two models differ if their forwards do."""
    return json.dumps([asdict(model_config), str(dtype)], sort_keys=True)


class GraphCounts(NamedTuple):
    """How steps ran: in pieces, thereof by replaying a captured size, and the tokens that were added to reach one."""

    piecewise_steps: int = 0
    replays: int = 0
    padded_tokens: int = 0


class PrefillGraph:
    """A model's forward, in pieces from `use` on and eager before. Never raises because of a piece or a graph."""

    def __init__(self, model: nn.Module, platform: Platform, config: EngineConfig, make_context: MakeContext, page_size: int) -> None:
        self._model = model
        self._platform = platform
        self._config = config
        self._make_context = make_context
        self._page_size = page_size
        self._pieces: PiecewiseForward | None = None
        self._graphs: Graphs | None = None
        self._piecewise_steps = 0

    @property
    def num_pieces(self) -> int:
        """How many distinct pieces run; 0 while steps are eager."""
        return len(self._pieces.plan.pieces) if self._pieces is not None else 0

    @property
    def counts(self) -> GraphCounts:
        stats = self._graphs.stats if self._graphs is not None else None
        return GraphCounts(self._piecewise_steps, stats.replays if stats else 0, stats.padded_tokens if stats else 0)

    @property
    def graphs(self) -> Graphs | None:
        return self._graphs

    def use(self, pieces: PiecewiseForward) -> None:
        """Run steps through `pieces` from now on; sizes are to be captured with `capture_next`."""
        self._pieces = pieces
        sizes = self._sizes()
        if sizes:
            buffers = [torch.zeros(sizes[-1], dtype=torch.int64, device=self._platform.device()) for _ in range(2)]
            self._graphs = Graphs(
                pieces,
                self._platform,
                buffers=buffers,
                sizes=sizes,
                dummy_step=self._dummy_step,
                eager=self._model,
                debug=self._config.debug_cuda_graph,
            )

    def capture_next(self) -> bool:
        """Capture the largest size that is pending; False where none is."""
        pending = self._graphs.pending() if self._graphs is not None else []
        if self._graphs is None or not pending:
            return False
        self._graphs.capture(pending[0])
        return True

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] of a step, under the forward context that is set."""
        if self._pieces is None:
            hidden: torch.Tensor = self._model(input_ids, positions)
            return hidden
        self._piecewise_steps += 1
        replayed = self._replay([input_ids, positions])
        return self._pieces(input_ids, positions) if replayed is None else replayed

    def _replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        size = self._graphs.choose(inputs[0].shape[0]) if self._graphs is not None else None
        return None if size is None or self._graphs is None else self._graphs.replay(size, inputs)

    def _sizes(self) -> list[int]:
        """What to capture. Where a graph only calls its work again, nothing, unless sizes are given."""
        option = parse_sizes(self._config.piecewise_cuda_graph_tokens)
        if not self._platform.graphs_are_real and option.given is None:
            return []
        assert self._config.chunked_prefill_size is not None
        cap = min(self._config.chunked_prefill_size, self._config.piecewise_cuda_graph_max_tokens or self._config.chunked_prefill_size)
        return choose_sizes(option, cap, {})

    @contextmanager
    def _dummy_step(self, size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
        """One made-up prompt of `size` tokens that stores its keys and values in the reserved page; another one for each seed."""
        device, slot_dtype = self._platform.device(), self._platform.slot_dtype
        slots = torch.arange(size, device=device) % self._page_size + RESERVED_PAGE * self._page_size
        metadata = AttentionMetadata(
            query_lens=[size],
            seq_lens=[size],
            block_table=torch.full((1, 1), RESERVED_PAGE, dtype=slot_dtype, device=device),
            slot_mapping=slots.to(slot_dtype),
        )
        with self._make_context(metadata):
            yield [(torch.arange(size, device=device) + 13 * seed) % 97, torch.arange(size, device=device)]
