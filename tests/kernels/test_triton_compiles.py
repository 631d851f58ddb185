"""Triton's kernels compile as they are launched for GPUs that are not here, fit them, and use what
those are fast with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.lab.compiled import cases
from piecework.lab.compiled.__main__ import Row, main

# Prints the kernels that no case launches.
_NAMES = """
import importlib, pkgutil
from unittest.mock import patch
from triton.runtime.jit import JITFunction
import piecework.kernels.triton as folder
from piecework.lab.compiled import cases, targets
defined, launched = set(), set()
for each in pkgutil.iter_modules(folder.__path__):
    found = vars(importlib.import_module(f"{folder.__name__}.{each.name}")).values()
    defined |= {value.fn.__name__ for value in found if isinstance(value, JITFunction)}
record = lambda self, *args, **others: launched.add(self.fn.__name__)
with targets.recording(90), patch.object(JITFunction, "run", record):
    for case in cases.cases():
        case.call()
assert len(launched) > 20
print(*(name for name in defined - launched if name.endswith("_kernel")))
"""
_MATRIX = {90: "wgmma.mma_async", 100: "tcgen05.mma"}


def _run(*arguments: str) -> str:
    """Run Python in a process of its own, because Triton decides once whether its kernels are
    interpreted.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _compiled(*arguments: str) -> list[dict[str, Any]]:
    printed = _run("-m", "piecework.lab.compiled", "--json", *arguments)
    return [json.loads(line) for line in printed.splitlines()]


def test_every_kernel_has_a_case() -> None:
    assert _run("-c", _NAMES).split() == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"shared": 99 * 1024}, None),
        ({"shared": 99 * 1024 + 1}, "101377 bytes of shared memory, of 101376"),
        ({"error": "CompilationError: x"}, "CompilationError: x"),
        ({"is_trap": True}, "compiles to a trap"),
    ],
)
def test_a_kernel_that_a_target_refuses_ends_the_command_with_1(
    row: dict[str, Any], fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").write_text(json.dumps({"target": 86, "case": "a", "kernel": "b", **row}))
    code = main(["--targets", "--rows", str(tmp_path / "rows")])
    assert code == (fault is not None)
    assert capsys.readouterr().err == ("" if fault is None else f"86: a: b: {fault}\n")


def test_a_run_goes_on_where_another_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def rows(target: int, chosen: Iterable[cases.Case]) -> Iterator[list[Row]]:
        for case in chosen:
            compiled.append(case.name)
            yield [Row(target, case.name, "a_kernel")]

    monkeypatch.setattr("piecework.lab.compiled.__main__.rows", rows)
    flags = ["--targets", "90", "--rows", str(tmp_path / "rows"), "--cases"]
    assert main([*flags, "Gemma 2"]) == main([*flags, "Gemma"]) == 0
    assert compiled == ["Gemma 2", "Gemma 3"]


def test_large_heads_fit_a_small_gpu() -> None:
    """Heads of 256 on compute capability 8.6, which has 99 KiB of shared memory for a block."""
    rows = _compiled("--quick", "--targets", "86", "--cases", "Gemma 2")
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
