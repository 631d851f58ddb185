"""Decode steps of a Llama-shaped model in one native call: the model's own weights, read where they lie.

T tokens, B requests, N hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...attention import AttentionMetadata
from .build import load_kernels, runnable_variants

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


_VARIANT = "avx512_bf16"
"""Where the products of bfloat16 have an instruction of their own; elsewhere plain torch was not beaten."""


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("rows", _INT), ("columns", _INT)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *(("k_cache", _POINTER), ("v_cache", _POINTER), ("scale", _FLOAT), ("window", _INT)),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("layers", "embedding", "norm", "cos", "signed_sin")),
        *((name, _INT) for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_size", "page_size")),
        ("eps", _FLOAT),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("model", "ids", "positions", "slots", "table", "query_lens", "seq_lens", "out")),
        *(("table_stride", _LONG), ("requests", _INT), ("tokens", _INT)),
    ]


class NativeStep:
    """The forward of small steps, and the output head for few rows. The model and the cache must outlive it unmoved.

    `k_cache`, `v_cache`: one tensor [P, S, K, D] a layer; `specs`: what has the `scale` and `window` of each layer.
    """

    max_tokens = 32
    max_logit_rows = 2
    """With more rows, torch's blocked matrix kernels are as fast; where both run was measured (docs/performance-cpu.md)."""

    def __init__(
        self, library: ctypes.CDLL, model: Any, specs: Sequence[Any], k_cache: Sequence[torch.Tensor], v_cache: Sequence[torch.Tensor]
    ) -> None:
        self._step, self._logits = library.piecework_step, library.piecework_logits
        self._owners = (model, k_cache, v_cache)
        decoder = model.model
        layers = [_layer(*parts) for parts in zip(decoder.layers, specs, k_cache, v_cache, strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        self._hidden, self._vocab = model.lm_head.weight.shape[1], model.lm_head.weight.shape[0]
        first = decoder.layers[0].self_attn
        self._model = _Model(
            ctypes.addressof(self._layers),
            *(
                part.data_ptr()
                for part in (decoder.embed_tokens.weight, decoder.norm.weight, decoder.rotary.cos, decoder.rotary.signed_sin)
            ),
            *(len(layers), self._hidden, decoder.layers[0].mlp.down_proj.weight.shape[1]),
            *(first.num_heads, first.num_kv_heads, first.head_dim, k_cache[0].shape[1]),
            decoder.norm.eps,
        )
        self._head = _linear(model.lm_head)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """input_ids, positions [T] int64, T up to `max_tokens`, to hidden states [T, N]; keys and values go to their slots."""
        out = torch.empty(input_ids.shape[0], self._hidden, dtype=torch.bfloat16)
        table, slots = metadata.block_table.to(torch.int64).contiguous(), metadata.slot_mapping.to(torch.int64).contiguous()
        lens = torch.tensor([metadata.query_lens, metadata.seq_lens], dtype=torch.int32)
        step = _Step(
            ctypes.addressof(self._model),
            *(part.data_ptr() for part in (input_ids.contiguous(), positions.contiguous(), slots, table, lens[0], lens[1], out)),
            *(table.stride(0), lens.shape[1], out.shape[0]),
        )
        self._step(ctypes.byref(step), torch.get_num_threads())
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, N] to logits [n, V] float32."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._vocab, dtype=torch.float32)
        pointers = (ctypes.c_void_p(part.data_ptr()) for part in (hidden, out))
        self._logits(ctypes.byref(self._head), *pointers, hidden.shape[0], torch.get_num_threads())
        return out


def make_native_step(
    model: nn.Module, specs: Sequence[Any], k_cache: Sequence[torch.Tensor], v_cache: Sequence[torch.Tensor]
) -> NativeStep | None:
    """None for what the kernels do not know: other dtypes than bfloat16, other shapes than Llama's, another CPU, no kernels."""
    library = load_kernels() if runnable_variants()[0].name == _VARIANT else None
    return None if library is None or not is_known(model) else NativeStep(library, model, specs, k_cache, v_cache)


def is_known(model: Any) -> bool:
    """Whether it is a decoder of Llama's shape, in bfloat16."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.device.type != "cpu" for tensor in tensors):
        return False
    return {name for name, _ in model.named_children()} == {"model", "lm_head"} and model.model.layers[0].self_attn.head_dim % 2 == 0


def _layer(layer: Any, spec: Any, k_cache: torch.Tensor, v_cache: torch.Tensor) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    return _Layer(
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        *(_linear(part) for part in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)),
        *(k_cache.data_ptr(), v_cache.data_ptr(), spec.scale, spec.window or 0),
    )


def _linear(linear: Any) -> _Linear:
    bias = getattr(linear, "bias", None)
    return _Linear(linear.weight.data_ptr(), None if bias is None else bias.data_ptr(), *linear.weight.shape)
