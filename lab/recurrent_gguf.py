"""Writes a random Qwen3.5 as a GGUF file, for measurements of prompts and decodes through a gated
delta net beside llama.cpp, which reads it too:

    python -m piecework.lab.recurrent_gguf /tmp/qwen35.gguf
    python -m piecework.lab.recurrent --file /tmp/qwen35.gguf --prompt 1024
    llama-bench -m /tmp/qwen35.gguf -p 1024 -n 32
    piecework bench peers --model-path /tmp/qwen35.gguf --loads single,prefill \\
        --server "piecework=piecework serve /tmp/qwen35.gguf --port {port}" \\
        --server "llama=llama-server -m /tmp/qwen35.gguf -c 16384 -np 8 --port {port}"

Of Qwen3.5 0.8B's shape in Q4_0, but for its vocabulary, which is that of another file's tokenizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from .moe_gguf import write_random


class Shape(NamedTuple):
    """Sizes of the model; `head`, `linear_head`: numbers of a head of attention, and of states."""

    layers: int = 24
    hidden: int = 1024
    width: int = 3584
    heads: int = 8
    kv_heads: int = 2
    head: int = 256
    linear_heads: int = 16
    linear_head: int = 128
    interval: int = 4


_SHAPE = Shape()
_COLUMNS = 4
"""Of the convolution."""


def write(path: str, shape: Shape = _SHAPE, *, tokenizer: str = "smollm2-135m") -> None:
    """Write the file, with the tokenizer of a .gguf file or its alias."""
    write_random(path, "qwen35", _metadata(shape), partial(_tensors, shape), tokenizer)


def _metadata(shape: Shape) -> dict[str, Any]:
    rotated = shape.head // 4
    return {
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [
            rotated // 6,
            rotated // 6,
            rotated // 2 - 2 * (rotated // 6),
            0,
        ],
        "ssm.conv_kernel": _COLUMNS,
        "ssm.state_size": shape.linear_head,
        "ssm.group_count": shape.linear_heads,
        "ssm.time_step_rank": shape.linear_heads,
        "ssm.inner_size": shape.linear_heads * shape.linear_head,
        "full_attention_interval": shape.interval,
    }


def _tensors(shape: Shape, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, inner = shape.hidden, shape.width, shape.linear_heads * shape.linear_head
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    attention: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (2 * queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_q_norm.weight": (shape.head,),
        "attn_k_norm.weight": (shape.head,),
        "attn_output.weight": (hidden, queries),
    }
    recurrent: dict[str, tuple[int, ...]] = {
        "attn_qkv.weight": (3 * inner, hidden),
        "attn_gate.weight": (inner, hidden),
        "ssm_conv1d.weight": (3 * inner, _COLUMNS),
        "ssm_dt.bias": (shape.linear_heads,),
        "ssm_a": (shape.linear_heads,),
        "ssm_beta.weight": (shape.linear_heads, hidden),
        "ssm_alpha.weight": (shape.linear_heads, hidden),
        "ssm_norm.weight": (shape.linear_head,),
        "ssm_out.weight": (hidden, inner),
    }
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(shape.layers):
        is_full = (layer + 1) % shape.interval == 0
        for name, sizes in {
            "attn_norm.weight": (hidden,),
            **(attention if is_full else recurrent),
            "post_attention_norm.weight": (hidden,),
            "ffn_gate.weight": (width, hidden),
            "ffn_up.weight": (width, hidden),
            "ffn_down.weight": (hidden, width),
        }.items():
            yield f"blk.{layer}.{name}", sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("path")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="a .gguf file or alias")
    parsed = parser.parse_args()
    write(parsed.path, tokenizer=parsed.tokenizer)


if __name__ == "__main__":
    main()
