"""Writes a model of images and text as two GGUF files, for measurements beside llama-server, which
reads them too:

    python -m piecework.lab.vision_gguf /tmp/smolvlm
    piecework serve /tmp/smolvlm/model.gguf
    llama-server -m /tmp/smolvlm/model.gguf --mmproj /tmp/smolvlm/mmproj.gguf

The text model is another file's, with SmolVLM's tokens and chat template. The vision tower has the
shapes of SmolVLM-256M's and random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from ..runtime.files.resolve import find_model

_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TOKENS = [
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
_LIST, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


class Shape(NamedTuple):
    """Sizes of the vision tower. `side` is the number of pixels of a side of a tile."""

    layers: int = 12
    hidden: int = 768
    width: int = 3072
    heads: int = 12
    side: int = 512
    patch: int = 16
    scale: int = 4
    longest: int = 2048


_SHAPE = Shape()


def write(folder: str | Path, shape: Shape = _SHAPE, *, text: str = "smollm2-135m") -> None:
    """Write model.gguf and mmproj.gguf. `text` is a .gguf file of the text model, or its alias."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    width = _write_text(Path(folder, "model.gguf"), text)
    _write_tower(Path(folder, "mmproj.gguf"), shape, width)


def _write_text(path: Path, source: str) -> int:
    """Write the text model with more tokens. Return the width of its embeddings."""
    reader = gguf.GGUFReader(find_model(source))
    architecture = reader.fields["general.architecture"].contents()
    types = [int(gguf.TokenType.CONTROL)] * len(_TOKENS)
    changed: dict[str, Any] = {
        _LIST: [*reader.fields[_LIST].contents(), *_TOKENS],
        _TYPES: [*reader.fields[_TYPES].contents(), *types],
        "tokenizer.chat_template": _TEMPLATE,
    }
    changed[f"{architecture}.vocab_size"] = len(changed[_LIST])
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in ("token_embd.weight", "output.weight"):
            # The new tokens have the embeddings of the first ones.
            data = np.concatenate([data, data[: len(_TOKENS)]])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    _finish(writer)
    return int(reader.fields[f"{architecture}.embedding_length"].contents())


def _write_tower(path: Path, shape: Shape, width: int) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", val=True)
    writer.add_bool("clip.use_gelu", val=True)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for key, number in {
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.width,
        "block_count": shape.layers,
        "attention.head_count": shape.heads,
        "image_size": shape.side,
        "preproc_image_size": shape.longest,
        "patch_size": shape.patch,
        "projection_dim": width,
        "projector.scale_factor": shape.scale,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    random = np.random.default_rng(0)
    for name, sizes in _tensors(shape, width):
        writer.add_tensor(name, _numbers(random, name, sizes))
    _finish(writer)


def _tensors(shape: Shape, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, square = shape.hidden, (shape.hidden, shape.hidden)
    yield "v.patch_embd.weight", (hidden, 3, shape.patch, shape.patch)
    yield "v.patch_embd.bias", (hidden,)
    yield "v.position_embd.weight", ((shape.side // shape.patch) ** 2, hidden)
    for layer in range(shape.layers):
        for name, sizes in {
            "ln1": (hidden,),
            **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), square),
            "ln2": (hidden,),
            "ffn_up": (shape.width, hidden),
            "ffn_down": (hidden, shape.width),
        }.items():
            yield f"v.blk.{layer}.{name}.weight", sizes
            yield f"v.blk.{layer}.{name}.bias", sizes[:1]
    yield "v.post_ln.weight", (hidden,)
    yield "v.post_ln.bias", (hidden,)
    yield "mm.model.fc.weight", (width, hidden * shape.scale**2)


def _numbers(
    random: np.random.Generator, name: str, sizes: tuple[int, ...]
) -> npt.NDArray[np.float16] | npt.NDArray[np.float32]:
    if len(sizes) == 1:
        return np.full(sizes, float(name.endswith("weight")), np.float32)
    numbers = random.normal(0, 0.02, sizes).astype(np.float32)
    return numbers if "position" in name else numbers.astype(np.float16)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder")
    parser.add_argument("--text", default="smollm2-135m", help="a .gguf file or alias")
    parser.add_argument(
        "--longest",
        type=int,
        default=_SHAPE.longest,
        help="pixels of the longer side to which images are resized; 512: one tile",
    )
    parsed = parser.parse_args()
    write(parsed.folder, _SHAPE._replace(longest=parsed.longest), text=parsed.text)


if __name__ == "__main__":
    main()
