"""The pieces of an engine's model: their compiler, their store, their key, and the lengths of
steps.
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
from ...kernels.platform.compilation import Compilation
from ..config.model import ModelConfig
from ..config.resolved import ResolvedConfig
from ..quantization.methods import Kinds, named_linears

S = TypeVar("S", bound=PieceStore)
# Tokens of the example that is traced. Any number above 1 gives the same pieces.
TRACE_TOKENS = 64


def piece_store(kind: type[S], config: ResolvedConfig, platform: Compilation) -> S:
    """Return the store of this machine's pieces. `kind` is `PieceStore`, which only loads pieces,
    or a subclass that makes them too.

    Raise `ValueError` that names the flag, or `OSError` if the cache folder cannot be used.
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
    """Return the number of tokens of the longest step that pieces must support."""
    return max(config.chunked_prefill_size, TRACE_TOKENS)


def most_rows(config: ResolvedConfig) -> int:
    """Return the number of tokens of the longest step that is computed or captured."""
    return max(most_tokens(config), config.cuda_graph_max_bs)


def stored_key(
    model: nn.Module,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kinds: Kinds,
    *,
    ranks: int = 1,
    ep_size: int = 1,
    adapters: bool = False,
) -> str:
    """Return the key of a model's pieces. Models with different traced forwards have different
    keys.

    `model` has the layouts of its packed linear layers, which decide how weights are multiplied.
    `kinds` are the kinds of these layers. The model is split over `ranks`, which all have the same
    forward, in `ep_size` groups of experts. With `adapters`, the forward adds the updates of the
    model's slots.
    """
    layouts = {prefix: linear.layout for prefix, linear in named_linears(model)}
    linears = _digest(json.dumps([dict(kinds), layouts], sort_keys=True))
    split = f" split over {ranks}" * (ranks > 1) + f" in {ep_size} groups" * (ep_size > 1)
    shapes = {
        prefix: [list(tensor.shape) for tensor in linear.adapters.buffers()]
        for prefix, linear in named_linears(model)
        if adapters and isinstance(linear.adapters, nn.Module)
    }
    slots = f" adapters {_digest(json.dumps(shapes, sort_keys=True))}" * adapters
    return f"{model_key(model_config, dtype)} linears {linears}{split}{slots}"


def model_key(model_config: ModelConfig, dtype: torch.dtype) -> str:
    """Return a text that differs between models whose forwards differ."""
    return json.dumps([asdict(model_config), str(dtype)], sort_keys=True)


def seen_lengths(model_config: ModelConfig, dtype: torch.dtype) -> LengthHistogram:
    """Return the recorded lengths of this model's steps on this machine, in tokens."""
    return LengthHistogram(
        cache_folder() / "lengths" / f"{_digest(model_key(model_config, dtype))}.json"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
