"""Compares a model in NVFP4 on a CPU with the same model in Q4_0 and in bfloat16:

    python -m piecework.lab.nvfp4_speed smollm2-135m

Writes the matrices of a .gguf file in both formats, and prints bfloat16's time divided by that of
each, for a decode of one request and for a prompt. The engines take turns on one thread. Each
figure is the median of the ratios of processor time, which other processes hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from ..kernels.fp4 import E4M3
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.files.resolve import find_model
from ..runtime.llm import LLM
from ..runtime.quantization.grouped_weight import packed_nibbles
from ..runtime.quantization.nvfp4 import gguf_blocks

_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # Between the numbers of e2m1.
_PROMPT, _DECODED = 256, 24


def quantise_nvfp4(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], float]:
    """Return the blocks of a matrix, and the scale of the tensor."""
    groups = torch.from_numpy(values).view(len(values), -1, 16)
    whole = float(groups.abs().max()) / (448 * 6)
    scales = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
    numbers = groups / (scales.float() * whole).clamp_min(1e-30)[..., None]
    codes = torch.bucketize(numbers.abs(), _MIDDLES) + 8 * (numbers < 0)
    packed = packed_nibbles(codes.flatten(1).to(torch.uint8))
    blocks: npt.NDArray[np.uint8] = gguf_blocks(packed, scales).numpy()
    return blocks, whole


def write(source: str, path: Path, kind: Kind) -> None:
    """Write the matrices of the layers of `source` in another format."""
    reader = gguf.GGUFReader(find_model(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or len(tensor.shape) != 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind != Kind.NVFP4:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
            continue
        blocks, whole = quantise_nvfp4(values)
        writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        name = tensor.name.removesuffix(".weight")
        writer.add_tensor(f"{name}.scale", np.array([whole], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(llm: LLM, prompt: Sequence[int], tokens: int) -> float:
    """Return the processor time that one request takes."""
    began = time.process_time()
    llm.generate([list(prompt)], SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.nvfp4_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a .gguf file or alias")
    parser.add_argument("--rounds", type=int, default=9, help="of each figure; default: 9")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{kind.name}.gguf") for kind in (Kind.NVFP4, Kind.Q4_0)}
        for kind, path in files.items():
            write(arguments.source, path, kind)
        chosen = [(kind.name, path, "auto") for kind, path in files.items()]
        chosen.append(("bfloat16", files[Kind.NVFP4], "none"))
        llms = {
            name: LLM(
                str(path),
                quantization=how,
                num_threads=1,
                max_total_tokens=1024,
                disable_radix_cache=True,
                disable_piecewise_cuda_graph=True,
            )
            for name, path, how in chosen
        }
        ratios: dict[str, dict[str, list[float]]] = {name: {} for name in llms}
        for _ in range(arguments.rounds):
            took: dict[str, dict[str, float]] = {}
            for name, llm in llms.items():
                prompt = seconds(llm, range(100, 100 + _PROMPT), 1)
                whole = seconds(llm, range(100, 108), 1 + _DECODED)
                took[name] = {"decode": whole, "prompt": prompt}
            for name, figures in took.items():
                for what, each in figures.items():
                    ratios[name].setdefault(what, []).append(took["bfloat16"][what] / each)
    print("| weights | decode | prompt |\n|---|---|---|")
    for name, found in ratios.items():
        decode, prompt = (statistics.median(found[what]) for what in ("decode", "prompt"))
        print(f"| {name} | {decode:.2f} | {prompt:.2f} |")


if __name__ == "__main__":
    main()
