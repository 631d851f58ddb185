"""Whatever format a checkpoint has, scales that no quantiser writes are refused when it is loaded:
the model would answer with NaN. GGUF's are in `tests/runtime/loader/test_gguf_scales.py`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf_models import Kind, write_gguf
from packed_models import written
from quantized_checkpoints import COMPRESSED, make_compressed, make_fp8
from safetensors.torch import load_file, save_file

from piecework.runtime.loader.loader import load_model
from tests.runtime.quantization.test_mxfp4 import make_pair as make_mxfp4
from tests.runtime.quantization.test_nvfp4 import make_pair as make_nvfp4


def compressed(path: Path) -> Path:
    form, weights, inputs = COMPRESSED["int8-channel-static"]
    return make_compressed(path, weights, inputs, form=form)


FORMATS: dict[str, Callable[[Path], Path]] = {
    "fp8": lambda path: make_fp8(path, block=False, static=True),
    "fp8 blocks": lambda path: make_fp8(path, block=True),
    "int8": compressed,
    "awq": lambda path: written(path, "awq").path,
    "gptq": lambda path: written(path, "gptq-act-order").path,
    "pack-quantized": lambda path: written(path, "pack-4-asymmetric").path,
    "mxfp4": lambda path: make_mxfp4(path)[1],
    "nvfp4 by compressed-tensors": lambda path: make_nvfp4(path, "compressed", "llama")[1],
    "nvfp4 by modelopt": lambda path: make_nvfp4(path, "modelopt", "llama")[1],
}
# Read only by products of activations of 4 bits, and then checked.
UNREAD = {
    "nvfp4 by compressed-tensors": "input_global_scale",
    "nvfp4 by modelopt": "input_scale",
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_scale_that_is_no_number_is_refused(form: str, tmp_path: Path) -> None:
    """The last scale of a tensor, of each kind of tensors with scales, in turn."""
    folder = FORMATS[form](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kinds = {name.rpartition(".")[2]: name for name in sorted(tensors) if "scale" in name}
    kinds.pop(UNREAD.get(form, ""), None)
    assert kinds
    for name in kinds.values():
        good = tensors[name]
        # The conversion to 8 bits makes the largest number of what is larger.
        for value in (math.nan, math.inf, 1e38)[: 1 if good.itemsize == 1 else 3]:
            wrong = good.clone()
            if wrong.dtype == torch.uint8:
                wrong.view(-1)[-1] = 255
            else:
                wrong.view(-1)[-1:] = torch.tensor(value).to(wrong.dtype)
            save_file(tensors | {name: wrong}, folder / "model.safetensors")
            with pytest.raises(
                ValueError, match=r"the tensor \S+scale.*; download the model again"
            ):
                load_model(
                    str(folder), torch.float32, torch.device("cpu"), False, quantization="auto"
                )


@pytest.mark.slow
def test_the_command_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    numbers, folder = make_nvfp4(tmp_path, "modelopt", "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_2"
    save_file(tensors | {name: torch.tensor(1e38)}, folder / "model.safetensors")
    file = tmp_path / "model.gguf"
    write_gguf(numbers, file, "llama", Kind.Q8_0)
    reader = GGUFReader(file, "r+")
    (weight,) = (tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight")
    weight.data[0, :2] = 0, 0x7C
    reader.data.flush()
    said = {folder: f"{name} must hold a scale above", file: f"{weight.name} has scales that are"}
    for path, text in said.items():
        flags = ["--port", "0", "--tokenizer-path", str(numbers)]
        command = [sys.executable, "-m", "piecework", "serve", str(path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert text in done.stderr.splitlines()[-1]
