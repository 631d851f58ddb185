"""In place of the process that compiles a model's pieces: this one, where faults can be seeded and
simulated devices are.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from piecework.compilation.capture import Reason
from piecework.compilation.core.errors import TraceError
from piecework.compilation.piece_maker import PieceMaker
from piecework.kernels.platform.detect import detect
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.resolved import ResolvedConfig
from piecework.runtime.graphs.compile_pieces import make_all_pieces
from piecework.runtime.graphs.compile_process import Outcome
from piecework.runtime.graphs.pieces import piece_store
from piecework.runtime.loader.parallel import Shard
from piecework.runtime.quantization.methods import Kinds


class CompiledHere:
    """To be set in place of `graph_startup.start`. Two looks later its pieces are in the cache."""

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        dtype: torch.dtype,
        kinds: Kinds,
        adapter_rank: int | None = None,
    ) -> None:
        platform = detect(config.device)
        maker = piece_store(PieceMaker, config, platform)
        backend = platform.attention_backend(config.attention_backend)
        kernels = platform.linear_kernels(dtype, backend, config.cpu_activations)
        shard = Shard(0, config.tp_size, platform.cuts_head_groups)
        config = replace(config, max_lora_rank=adapter_rank)
        self._outcome = Outcome(None)
        try:
            make_all_pieces(maker, config, model_config, dtype, kernels, kinds, shard)
        except TraceError as error:
            self._outcome = Outcome(Reason.TRACE_FAILED, str(error))
        self._looks = 0

    def poll(self) -> Outcome | None:
        self._looks += 1
        return self._outcome if self._looks > 2 else None

    def wait(self) -> Outcome:
        self._looks = 2
        return self._outcome

    def stop(self) -> None:
        """There is no process to end."""
