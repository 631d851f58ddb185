"""Repeated launches pass what a first launch passes, and cost the host less."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

# A mixed step of int8 pages, so that every kind of argument differs from layer to layer.
_SCRIPT = """
from dataclasses import replace
from unittest.mock import patch

import torch

from piecework.kernels import cache_format
from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.triton.attention import TritonAttention
from piecework.lab.compiled import host


def plain(arguments):
    # Without Triton's hooks, which are new objects at each launch.
    given = [*arguments[:6], *arguments[9:]]
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in given]


launches = host.Launches()
metadata = AttentionMetadata(
    query_lens=[3, 1],
    seq_lens=[30, 400],
    block_table=torch.zeros(2, 32, dtype=torch.int64),
    slot_mapping=torch.zeros(4, dtype=torch.int64),
)
scratch = torch.empty(10_000)
same = patch.object(torch.Tensor, "new_empty", lambda *given, **options: scratch)
with host.launching(launches), same:
    backend = TritonAttention()
    plan = backend.plan(metadata, 16)
    for number in range(1, 4):
        layout = replace(
            KVLayout.of_heads(4, 2, 64, torch.bfloat16), softcap=10.0 * number,
            sinks=torch.zeros(4), cache_dtype=torch.int8, scale=0.5**number,
        )
        q, out = (torch.zeros(4, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.zeros(4, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        shape = cache_format.pages_shape(40, 16, 2, 64, torch.int8)
        given = (q, k, v, out, *(torch.zeros(shape, dtype=torch.int8) for _ in range(2)))
        launches.clear()
        calls = host.calls_of(lambda: backend.run(*given, plan, layout))
        repeated = [plain(one) for one in launches]
        kept, plan.launches = plan.launches, {}
        launches.clear()
        backend.run(*given, plan, layout)
        assert len(kept) == 1 and len(repeated) == 4, (kept, repeated)
        assert repeated == [plain(one) for one in launches], (repeated, launches)
        plan.launches = kept
print(calls)
"""


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_repeated_launches() -> None:
    """They pass what first ones pass to all kernels of a layer (addresses, scales, sinks, grids).
    A layer of a mixed step made 357 calls of functions with Triton's own binding of arguments.
    """
    assert int(_run("-c", _SCRIPT)) <= 357 // 3
