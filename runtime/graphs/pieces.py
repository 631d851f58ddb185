"""How this engine's model becomes pieces: with which compiler, kept where, and which lengths of
steps its server has seen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TypeVar

import torch
from torch import nn

from ...compilation.cache import CompileCache
from ...compilation.compiler import piece_compiler
from ...compilation.histogram import LengthHistogram
from ...compilation.passes.config import PassConfig
from ...compilation.piece_store import PieceStore
from ...kernels.cache_folder import cache_folder
from ...kernels.platform import Platform
from ..config.engine import ResolvedConfig
from ..config.model import ModelConfig
from ..quantization.methods import Kinds, named_linears

S = TypeVar("S", bound=PieceStore)
TRACE_TOKENS = 64
"""Tokens of the example that is traced; any number above 1 gives the same pieces."""


def piece_store(kind: type[S], config: ResolvedConfig, platform: Platform) -> S:
    """Where the pieces of this machine lie; `kind` says whether they are only loaded from there, as
    a process that serves does it, or made too. Raises `ValueError` that names the flag, or
    `OSError` of the cache's folder.
    """
    return kind(
        platform=platform,
        compiler=piece_compiler(config.piecewise_cuda_graph_compiler, platform),
        cache=CompileCache(cache_folder()),
        max_tokens=most_tokens(config),
        passes=PassConfig.parse(config.passes),
        ranks=config.tp_size,
    )


def most_tokens(config: ResolvedConfig) -> int:
    """The longest step that pieces must be right for."""
    return max(config.chunked_prefill_size, TRACE_TOKENS)


def stored_key(
    model: nn.Module,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kinds: Kinds,
    *,
    ranks: int = 1,
    ep_size: int = 1,
) -> str:
    """Text in which two models differ if their traced forwards do. `model`: one with the layouts
    of its packed linear layers, by which the same weights are multiplied in several ways; `kinds`:
    of those layers; `ranks`: over which it is split, of which all have the same forward, in
    `ep_size` groups of experts.
    """
    layouts = {prefix: linear.layout for prefix, linear in named_linears(model)}
    linears = _digest(json.dumps([dict(kinds), layouts], sort_keys=True))
    split = f" split over {ranks}" * (ranks > 1) + f" in {ep_size} groups" * (ep_size > 1)
    return f"{model_key(model_config, dtype)} linears {linears}{split}"


def model_key(model_config: ModelConfig, dtype: torch.dtype) -> str:
    """Text in which two models differ if their forwards do."""
    return json.dumps([asdict(model_config), str(dtype)], sort_keys=True)


def seen_lengths(model_config: ModelConfig, dtype: torch.dtype) -> LengthHistogram:
    """How many tokens the steps of this model have had on this machine, kept beside its pieces."""
    return LengthHistogram(
        cache_folder() / "lengths" / f"{_digest(model_key(model_config, dtype))}.json"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
