"""The list of block formats that Python reads from the kernels, and the numbers that both write
down.
"""

from __future__ import annotations

import re
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_blocks import FORMATS
from native_variants import built, native_variants

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.gguf_formats import gguf_formats
from piecework.kernels.cpu.native.linear import layout_name
from piecework.kernels.cpu.native.linear_struct import INTEGERS, Layout

_SOURCES = Path(build.__file__).parent


def test_each_file_of_a_format_is_in_the_list() -> None:
    assert sorted(gguf_formats(built(native_variants()[0]))) == FORMATS


def test_formats_are_those_of_gguf_files() -> None:
    found = {
        name: (layout, columns, size)
        for name, (layout, columns, size) in gguf_formats(built(native_variants()[0])).items()
    }
    kinds = {name: GGMLQuantizationType[name] for name in found}
    assert found == {name: (int(kind), *GGML_QUANT_SIZES[kind]) for name, kind in kinds.items()}


def test_python_and_the_kernels_number_the_other_layouts_alike() -> None:
    (declared,) = re.findall(
        r"enum Format : int32_t \{(.*?)\n\}", (_SOURCES / "linear.h").read_text(), re.DOTALL
    )
    numbers = {
        re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).upper(): int(number)
        for name, number in re.findall(r"k(\w+) = (\d+)", declared)
    }
    assert numbers == {layout.name: layout.value for layout in Layout}


def test_a_layout_of_blocks_has_the_name_of_the_format() -> None:
    blocks = gguf_formats(built(native_variants()[0]))
    assert layout_name(blocks["Q4_K"].layout | INTEGERS) == "Q4_K by INT8"
    assert layout_name(Layout.FP8_BLOCKS) == "FP8_BLOCKS"
