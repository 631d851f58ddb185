"""Triton's kernels compile to machine code for GPUs that are not here, and use what those are fast
with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

_SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one block may have: CUDA C++ Programming Guide, technical specifications by compute
capability.
"""
_MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


# One of each kind for one generation at each run; all shapes are compiled with the long runs.
@pytest.mark.parametrize(
    ("which", "capability"),
    [
        ("some", 90),
        *(pytest.param("all", each, marks=pytest.mark.slow) for each in (80, 90, 100)),
    ],
)
def test_every_kernel_compiles_and_fits_a_multiprocessor(
    which: str, capability: int, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), which, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert all(entry["shared"] <= _SHARED_MEMORY[capability] for entry in compiled), compiled
    prefills = [entry for entry in compiled if entry["kernel"] == "prefill_kernel"]
    assert prefills and all(
        _MATRIX[capability] in entry["matrix"] and entry["copies_ahead"] for entry in prefills
    ), compiled
    products = [entry for entry in compiled if entry["kernel"].endswith("linear_kernel")]
    assert products and all(entry["matrix"] and entry["copies_ahead"] for entry in products)
