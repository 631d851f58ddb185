"""How this engine's model becomes pieces: with which compiler, kept where, and which lengths of steps its server has seen."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import asdict

import torch
from torch import nn

from ..compilation.cache import CompileCache, cache_folder
from ..compilation.compiler import InductorCompiler, piece_compiler
from ..compilation.histogram import LengthHistogram
from ..compilation.install import Installer, InstallReport, Progress
from ..compilation.piecewise import PiecewiseForward
from ..kernels import ops
from ..kernels.platform import Platform
from .config import EngineConfig
from .model_config import ModelConfig
from .weights.packing import NOTHING_PACKED, Kinds

_TRACE_TOKENS = 64
"""Tokens of the example that is traced; any number above 1 gives the same pieces."""


def installer(config: EngineConfig, platform: Platform, progress: Progress = lambda done, total: None) -> Installer:
    """How forwards become pieces. Raises `ValueError` that names the flag, or `OSError` of the cache's folder."""
    assert config.chunked_prefill_size is not None
    return Installer(
        platform=platform,
        compiler=piece_compiler(config.piecewise_cuda_graph_compiler, platform),
        cache=CompileCache(cache_folder()),
        max_tokens=max(config.chunked_prefill_size, _TRACE_TOKENS),
        progress=progress,
    )


def install(
    found: Installer, model: nn.Module, model_config: ModelConfig, dtype: torch.dtype, kinds: Kinds = NOTHING_PACKED
) -> tuple[PiecewiseForward, InstallReport]:
    """The model's forward in pieces: from the cache where it is there, else traced and compiled into it. Raises `TraceError`.

    `kinds`: the linear layers whose weights are packed.
    """
    device = found.platform.device()
    example = [torch.arange(_TRACE_TOKENS, device=device), torch.arange(_TRACE_TOKENS, device=device)]
    with torch.no_grad(), ops.plain_torch() if _looks_inside(found) else nullcontext():
        return found.install(model, example, model_key=_key(found, model_config, dtype, kinds))


def load(found: Installer, model: nn.Module, model_config: ModelConfig, dtype: torch.dtype, kinds: Kinds) -> PiecewiseForward | None:
    """The same if the cache holds all of it; None where something would have to be traced or compiled."""
    stored = found.load(model, _key(found, model_config, dtype, kinds))
    return None if stored is None else stored[0]


def _looks_inside(found: Installer) -> bool:
    """Whether the compiler fuses the ops of a piece, so that it is to see what they mean rather than kernels."""
    return isinstance(found.compiler, InductorCompiler)


def _key(found: Installer, model_config: ModelConfig, dtype: torch.dtype, kinds: Kinds) -> str:
    linears = _digest(json.dumps(dict(kinds), sort_keys=True))
    return f"{model_key(model_config, dtype)} {'plain' if _looks_inside(found) else 'own'} ops, linears {linears}"


def model_key(model_config: ModelConfig, dtype: torch.dtype) -> str:
    """Text in which two models differ if their forwards do."""
    return json.dumps([asdict(model_config), str(dtype)], sort_keys=True)


def seen_lengths(model_config: ModelConfig, dtype: torch.dtype) -> LengthHistogram:
    """How many tokens the steps of this model have had on this machine, kept beside its pieces."""
    return LengthHistogram(cache_folder() / "lengths" / f"{_digest(model_key(model_config, dtype))}.json")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
