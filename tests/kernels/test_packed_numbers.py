"""The PTX that widens 4-bit numbers, run instruction by instruction for every byte."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.kernels.triton import packed_numbers

_INSTRUCTION = re.compile(r"^\s*([\w.]+) ([^;]+);$")


def _halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats of a word."""
    return torch.from_numpy(np.array([word], np.uint32).view(np.int16).copy()).view(dtype)


def _word(halves: torch.Tensor) -> int:
    return int(halves.view(torch.int16).numpy().view(np.uint32)[0])


def run_ptx(text: str, given: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Run PTX of a few instructions. Unknown instructions raise."""
    registers = dict(given)

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in text.strip().strip("{}").strip().splitlines():
        found = _INSTRUCTION.match(line)
        assert found is not None, line
        operation, (target, *names) = found[1], found[2].replace(" ", "").split(",")
        if operation == ".reg":
            continue
        words = [value(name) for name in names] if operation != ".reg" else []
        if operation == "mov.b32":
            registers[target] = words[0]
        elif operation == "shr.b32":
            registers[target] = words[0] >> words[1]
        elif operation == "lop3.b32":
            a, b, c, table = words
            assert table == 0xEA, "(a & b) | c"
            registers[target] = (a & b) | c
        elif operation.startswith("fma.rn."):
            a, b, c = (_halves(word, dtype).double() for word in words)
            registers[target] = _word((a * b + c).to(dtype))
        else:
            raise AssertionError(f"unknown instruction {operation}")
    return registers


@pytest.mark.parametrize(
    ("dtype", "text", "largest"),
    [
        (torch.bfloat16, packed_numbers.NIBBLES_BFLOAT16.value, 128.0),
        (torch.float16, packed_numbers.NIBBLES_FLOAT16.value, 1024.0),
    ],
)
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_nibble_at_every_place(
    dtype: torch.dtype, text: str, largest: float, zero: int
) -> None:
    """Low and high numbers of bytes 0, 2, 1 and 3, minus the zero."""
    offset = _word(torch.full((2,), -largest - zero, dtype=dtype))
    for first in range(0, 256, 4):
        code = np.arange(first, first + 4, dtype=np.uint8)
        given = {"$4": int(code.view(np.uint32)[0]), "$5": offset, "$6": offset}
        registers = run_ptx(text, given, dtype)
        places = code[[0, 2, 1, 3]].astype(int)
        for names, expected in ((("$0", "$1"), places & 15), (("$2", "$3"), places >> 4)):
            numbers = torch.cat([_halves(registers[name], dtype) for name in names])
            assert numbers.tolist() == (expected - zero).tolist()
