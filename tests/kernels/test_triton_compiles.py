"""Triton's kernels compile as they are launched for GPUs that are not here, fit them, and use what
those are fast with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

_MATRIX = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def _compiled(*arguments: str) -> list[dict[str, Any]]:
    """Compile in a process of its own, because Triton decides once whether its kernels are
    interpreted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "piecework.lab.compiled", "--json", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_large_heads_fit_a_small_gpu() -> None:
    """Heads of 256 on compute capability 8.6, which has 99 KiB of shared memory for a block."""
    rows = _compiled("--quick", "--targets", "86")
    assert {"prefill_kernel", "decode_kernel"} <= {row["kernel"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("target", [86, 90])
def test_weights_of_few_bits_are_widened_in_few_instructions(target: int) -> None:
    """In a decode, counted as of four warps per 2 KiB of weights."""
    rows = _compiled("--targets", str(target), "--cases", "groups of 128, bfloat16, 1 tokens")
    for row, most in zip(rows, (120, 110), strict=True):
        assert row["instructions"] * row["warps"] / 4 * 2048 / row["loop_bytes"] <= most, row


@pytest.mark.slow
def test_pages_of_float8_cost_few_instructions_more_than_bfloat16() -> None:
    """A decode's tile of 64 keys has half the bytes."""
    names = ("Llama 3 8B", "float8_e4m3fn cache", "float8_e5m2 cache")
    rows = _compiled("--targets", "90", "--cases", *names)
    of = {
        name: max(
            row["instructions"]
            for row in rows
            if (row["case"], row["kernel"]) == (name, "decode_kernel")
        )
        for name in names
    }
    assert max(of.values()) <= 1.3 * of["Llama 3 8B"]


# A multiprocessor's generation each, with every kernel: minutes.
@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, 120])
def test_every_kernel_compiles_and_fits(target: int) -> None:
    rows = _compiled("--targets", str(target))
    matrix = _MATRIX.get(target, "mma.sync")
    prompts = [row for row in rows if row["kernel"] == "prefill_kernel"]
    prompts = [row for row in prompts if "float32" not in row["case"]]
    assert prompts and all(matrix in row["matrix"] and row["copies_ahead"] for row in prompts)
    # Known to spill registers: prompts over pages of 8 bits, with slopes, or in float32.
    spilling = ("cache", "ALiBi", "float32", "blocks")
    plain = [row for row in rows if not any(word in row["case"] for word in spilling)]
    assert [row for row in plain if row["stack"]] == []
    products = [row for row in rows if row["kernel"].endswith("linear_kernel")]
    assert products and all(row["copies_ahead"] for row in products)
