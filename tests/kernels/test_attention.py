"""The contract of attention backends, for each backend that runs on this machine: Triton's in its
interpreter unless there is a GPU, flashinfer's over a strict stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence

import flashinfer_standin
import pytest
import torch
from contract_attention import *  # noqa: F403
from contract_attention import Kind, requests
from examples import examples
from flashinfer_standin import store
from hypothesis import strategies as st
from native_variants import best_ways, errors_of, ways_of_others

from piecework.kernels.attention import AttentionBackend
from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cuda import attention
from piecework.kernels.cuda.attention import FlashInferAttention
from piecework.kernels.paged_attention import TorchAttention

FORMATS = tuple(CACHE_DTYPES.values())


def triton_backends() -> Sequence[AttentionBackend]:
    pytest.importorskip("triton_interpreter")
    from piecework.kernels.triton.attention import Blocks, TritonAttention

    # Tiles so small that short sequences have many.
    return [TritonAttention(blocks=Blocks(16, 16), num_splits=splits) for splits in (1, 4)]


KINDS = [
    Kind(
        "torch",
        lambda: [TorchAttention()],
        examples=50,
        dtypes=(torch.float32, torch.bfloat16),
        cache_dtypes=FORMATS,
        latent_sizes=((576, 512), (33, 20)),
        checks_plans=False,
        cuts_groups=True,
        errors=errors_of,
    ),
    Kind(
        "native",
        best_ways,
        lens=st.one_of(
            st.lists(st.tuples(st.integers(0, 20), st.integers(1, 150)), min_size=1, max_size=4),
            st.lists(st.tuples(st.integers(1, 200), st.integers(0, 150)), min_size=1, max_size=2),
        ),
        dtypes=(torch.float32, torch.bfloat16),
        page_sizes=(1, 3, 128, 64, 16),
        groups=(*range(1, 9), 40),
        head_sizes=(8, 26, 33, 64, 80, 96, 128, 256, 1),
        cache_dtypes=FORMATS,
        latent_sizes=((576, 512), (48, 32), (33, 20), (40, 39)),
        checks_plans=False,
        cuts_groups=True,
        errors=errors_of,
    ),
    Kind(
        "native of other CPUs",
        ways_of_others,
        examples=examples(8, exploring=20),
        lens=requests(60, 100, 2),
        dtypes=(torch.float32, torch.bfloat16),
        page_sizes=(3, 16),
        groups=(1, 2, 5),
        head_sizes=(26, 64, 33),
        # Each is a part, which takes seconds to compile for each variant.
        cache_dtypes=FORMATS[-1:],
        latent_sizes=((48, 32), (33, 20)),
        checks_plans=False,
        cuts_groups=True,
        errors=errors_of,
    ),
    Kind(
        "triton",
        triton_backends,
        device="cuda" if torch.cuda.is_available() else "cpu",
        examples=examples(2, exploring=8),
        lens=requests(20, 40, 3),
        kv_heads=(1, 2),
        groups=(1, 3),
        head_sizes=(8, 24, 26, 32),
        # Its reading of float8 has tests of its own.
        cache_dtypes=FORMATS[: examples(1, exploring=3)],
    ),
    Kind(
        "flashinfer",
        lambda: [FlashInferAttention(store)],
        cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
        latent_sizes=((24, 16),),
        modifies=False,
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 1024)
    return request.param
