"""What a compiled kernel takes: registers, stack, and the instructions of its inner loop."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA(?:\.\S+)?\s+.*?0x([0-9a-f]+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_MATRIX = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Usage(NamedTuple):
    """Attributes:
    registers: Registers per thread.
    stack: Bytes of local memory per thread, which spilled registers take.
    """

    registers: int
    stack: int


def usage(kernel: Any) -> Usage:
    found = _USAGE.search(_cuobjdump(kernel, "-res-usage"))
    assert found is not None, "cuobjdump has printed no usage"
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local)


def matrix_instructions(kernel: Any) -> list[str]:
    return [name for name in _MATRIX if name in kernel.asm["ptx"]]


def is_trap(kernel: Any) -> bool:
    """Return whether the kernel only stops the GPU, which is what Triton makes of some tiles
    without an error.
    """
    return "trap;" in kernel.asm["ptx"]


def copies_ahead(kernel: Any) -> bool:
    """Return whether loads are asynchronous copies, which a loop issues ahead."""
    return "cp.async" in kernel.asm["ptx"]


def inner_loop(kernel: Any) -> list[str]:
    """Return the instructions of the longest loop that contains no other; empty without a loop."""
    instructions = [
        (int(found[1], 16), found[2])
        for line in _cuobjdump(kernel, "-sass").splitlines()
        if (found := _INSTRUCTION.match(line))
    ]
    loops = []
    for address, text in instructions:
        found = _BRANCH.search(text)
        if found and (begin := int(found[1], 16)) < address:
            loops.append((begin, address))
    inner = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    bodies = [[text for at, text in instructions if low <= at <= high] for low, high in inner]
    return max(bodies, key=len, default=[])


def mix(body: list[str]) -> Counter[str]:
    """Count instructions by their names."""
    plain = (re.sub(r"^@!?U?P\w+\s+", "", text) for text in body)
    return Counter(text.split()[0].split(".")[0] for text in plain)


def loop_bytes(kernel: Any) -> int | None:
    """Return the bytes of weights, or of keys and values, that an iteration reads. None for kernels
    that read neither in a loop.
    """
    source = kernel.src
    names = source.fn.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    types = {name: str(kind).removeprefix("*") for name, kind in source.signature.items()}
    if source.fn.__name__ in ("decode_kernel", "prefill_kernel"):
        each = _BYTES.get(types["k_cache"], 1)
        return int(2 * constants["BLOCK_N"] * constants["HEAD"] * each)
    if source.fn.__name__ in ("packed_linear_kernel", "packed_experts_kernel"):
        bits = constants["BITS"] + constants["HIGH"]
        return int(constants["BLOCK_N"] * 64 * constants["UNITS"] * bits // 8)
    if "weight" in types and "BLOCK_K" in constants:
        numbers = constants["BLOCK_N"] * constants["BLOCK_K"]
        if "BITS" in constants:
            return int(numbers * constants["BITS"] // 8)
        return int(numbers * _BYTES.get(types["weight"], 1))
    return None


def _cuobjdump(kernel: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [_TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr
