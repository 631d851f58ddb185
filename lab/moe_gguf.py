"""Writes a random mixture of experts as a GGUF file, for measurements beside llama-server, which
reads it too:

    python -m piecework.lab.moe_gguf /tmp/moe.gguf
    piecework bench peers --model-path /tmp/moe.gguf --loads single,batch8 \\
        --server "piecework=piecework serve /tmp/moe.gguf --port {port}" \\
        --server "llama=llama-server -m /tmp/moe.gguf -c 16384 -np 8 --port {port}"

Of Qwen3-MoE's shape: 1.0 billion parameters in Q4_0, of which a token takes 0.15. Its tokenizer is
that of another file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from ..runtime.files.resolve import find_model

_ARCHITECTURE = "qwen3moe"
_Q4_0 = gguf.GGMLQuantizationType.Q4_0
_SCALE = 0.005
"""Of a block of numbers from -8 to 7: activations stay of order 1."""


class Shape(NamedTuple):
    """Sizes of the model; `head`: numbers of a head."""

    layers: int = 18
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head: int = 64
    experts: int = 64
    chosen: int = 4
    width: int = 256


_SHAPE = Shape()


def write(path: str, shape: Shape = _SHAPE, *, tokenizer: str = "smollm2-135m") -> None:
    """Write the file, with the tokenizer of a .gguf file or its alias."""
    write_random(path, _ARCHITECTURE, _metadata(shape), partial(_tensors, shape), tokenizer)


def write_random(
    path: str,
    architecture: str,
    metadata: dict[str, Any],
    tensors: Callable[[int], Iterable[tuple[str, tuple[int, ...]]]],
    tokenizer: str,
) -> None:
    """A random model as a GGUF file, with the tokenizer of another or its alias. `tensors`: names
    and sizes, rows before columns, of a vocabulary's size: those of one dimension hold ones, but
    logarithms of decays -1; those of routers and convolutions float32, others Q4_0.
    """
    source = gguf.GGUFReader(find_model(tokenizer))
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    random = np.random.default_rng(0)
    for name, sizes in tensors(vocab):
        if len(sizes) == 1:
            value = -1.0 if name.endswith("ssm_a") else 1.0
            writer.add_tensor(name, np.full(sizes, value, np.float32))
        elif name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight")):
            writer.add_tensor(name, random.normal(0, 0.02, sizes).astype(np.float32))
        else:
            writer.add_tensor(name, _blocks(random, sizes), raw_dtype=_Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(shape: Shape) -> dict[str, Any]:
    return {
        "context_length": 8192,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.width * shape.chosen,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "expert_count": shape.experts,
        "expert_used_count": shape.chosen,
        "expert_feed_forward_length": shape.width,
    }


def _tensors(shape: Shape, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes, rows before columns; a head that is tied to the embedding is none."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    opened, closed = (shape.experts, shape.width, hidden), (shape.experts, hidden, shape.width)
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(shape.layers):
        for name, sizes in {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_q_norm": (shape.head,),
            "attn_k_norm": (shape.head,),
            "attn_output": (hidden, queries),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (shape.experts, hidden),
            "ffn_gate_exps": opened,
            "ffn_up_exps": opened,
            "ffn_down_exps": closed,
        }.items():
            yield f"blk.{layer}.{name}.weight", sizes


def _blocks(random: np.random.Generator, sizes: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Random numbers of 4 bits, each 32 with the same scale (ggml's block_q4_0)."""
    *rows, columns = sizes
    blocks = random.integers(0, 256, (*rows, columns // 32, 18), dtype=np.uint8)
    blocks[..., :2] = np.array([_SCALE], np.float16).view(np.uint8)
    return blocks.reshape(*rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("path")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="a .gguf file or alias")
    parsed = parser.parse_args()
    write(parsed.path, tokenizer=parsed.tokenizer)


if __name__ == "__main__":
    main()
