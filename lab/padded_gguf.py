"""Writes a GGUF file again, in float32, with rows that formats of blocks of 256 columns can hold:

    python -m piecework.lab.padded_gguf smollm2-135m /tmp/padded.gguf
    llama-quantize --pure /tmp/padded.gguf /tmp/padded-q4_k.gguf q4_k
    python -m piecework.lab.activations /tmp/padded-q4_k.gguf

The model computes what it computed: channels of zeros are added to the residual stream, and a head
of zeros to those that read one head of keys. Norms, whose mean is over more numbers then, have the
weights and the epsilon that make up for it. Zeros are spread, so that each 256 columns have the
same share of them, and lie side by side there, so that no 32 columns hold both kinds of numbers:
SmolLM2-135M's 576 become three times 192 and 64 zeros.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ..runtime.files.resolve import find_model

_BLOCK = 256
_QUANTIZED = ("general.file_type", "general.quantization_version")


def write(source: str, path: str | Path) -> None:
    """`source`: a .gguf file of the llama architecture, or its alias."""
    reader = gguf.GGUFReader(find_model(source))
    architecture = reader.fields["general.architecture"].contents()

    def said(name: str) -> Any:
        return reader.fields[f"{architecture}.{name}"].contents()

    hidden, heads = said("embedding_length"), said("attention.head_count")
    parts, size = said("attention.head_count_kv"), hidden // heads
    part = hidden // parts
    padded = -(-part // _BLOCK) * _BLOCK
    keys, width = parts * size, said("feed_forward_length")
    if hidden in (keys, width) or keys * heads != parts * hidden or padded % size:
        raise ValueError(f"{source}: no zeros can be added to {hidden} channels, {heads} heads")
    share = part / padded
    changed = {
        f"{architecture}.embedding_length": parts * padded,
        f"{architecture}.attention.head_count": parts * padded // size,
        f"{architecture}.attention.layer_norm_rms_epsilon": share
        * said("attention.layer_norm_rms_epsilon"),
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *_QUANTIZED):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for axis in range(numbers.ndim):
            if numbers.shape[axis] == hidden:
                numbers = _spread(numbers, axis, parts, padded)
        if tensor.name.endswith("_norm.weight"):
            numbers *= np.float32(math.sqrt(share))
        writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _spread(
    numbers: npt.NDArray[np.float32], axis: int, parts: int, padded: int
) -> npt.NDArray[np.float32]:
    """With zeros behind each of the equal parts of an axis, which are `padded` numbers then."""
    before, after = numbers.shape[:axis], numbers.shape[axis + 1 :]
    divided = numbers.reshape(*before, parts, -1, *after)
    room = [(0, 0)] * divided.ndim
    room[axis + 1] = 0, padded - divided.shape[axis + 1]
    return np.pad(divided, room).reshape(*before, parts * padded, *after)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.padded_gguf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a .gguf file or alias")
    parser.add_argument("path", help="what is written")
    arguments = parser.parse_args()
    write(arguments.source, arguments.path)


if __name__ == "__main__":
    main()
