"""With `--batch-invariant` a request gets the same bits alone, beside others and in any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import multiply, native_linear
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

PROMPT = [(7 * i + 3) % 400 for i in range(75)]
PARAMS = SamplingParams(max_new_tokens=6, seed=5, ignore_eos=True, logprobs=4)
CASES: list[dict[str, Any]] = [
    {"architecture": "llama", "quantization": "none"},
    {"architecture": "mistral", "sliding_window": 20, "quantization": "q4_0"},
    {"architecture": "qwen3", "quantization": "q8_0"},
    {"architecture": "llama", "quantization": "int8"},
    {"architecture": "llama", "quantization": "none", "kv_cache_dtype": "int8"},
]

FLOATS, DOTS = 0, 1
"""Ways of `piecework_choose_way`."""

pytestmark = pytest.mark.skipif(
    not build.runnable_variants()[0].needs, reason="decodes run op by op on this CPU"
)


class Engines:
    """Of one model, by the most new tokens of a step."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        shape = dict(case)
        names = ("quantization", "kv_cache_dtype")
        self._settings = {name: shape.pop(name) for name in names if name in shape}
        self._path = make_tiny_model(folder, num_hidden_layers=2, **shape)
        self._kept: dict[int, LLM] = {}

    def __getitem__(self, chunk: int) -> LLM:
        if chunk not in self._kept:
            self._kept[chunk] = LLM(
                str(self._path),
                dtype="bfloat16",
                num_threads=2,
                max_total_tokens=4096,
                chunked_prefill_size=chunk,
                batch_invariant=True,
                **self._settings,
            )
        return self._kept[chunk]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case.values())))
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    yield Engines(tmp_path_factory.mktemp("invariant"), request.param)
    library = build.load_kernels()
    assert library is not None
    library.piecework_set_batch_invariant(0)


@settings(deadline=None, max_examples=8)
@given(
    neighbours=st.lists(st.tuples(st.integers(1, 75), st.booleans()), max_size=20),
    chunk=st.sampled_from([5, 64, 512]),
)
def test_a_request_gets_the_same_bits_in_any_company(
    engines: Engines, neighbours: list[tuple[int, bool]], chunk: int
) -> None:
    llm = engines[chunk]
    llm.core.flush_cache()
    (alone,) = engines[512].generate(PROMPT, PARAMS)
    # Some begin as it does, so that it finds pages, and they share them.
    others = [PROMPT[:length] if same else [9, *PROMPT][:length] for length, same in neighbours]
    *_, one = llm.generate([*others, PROMPT], PARAMS)
    assert one.token_ids == alone.token_ids
    assert one.logprobs == alone.logprobs


def test_what_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, num_hidden_layers=1)
    small: dict[str, Any] = {"max_total_tokens": 1024, "batch_invariant": True}
    with pytest.raises(ValueError, match="--batch-invariant needs native decodes"):
        LLM(str(path), dtype="float32", **small)


@pytest.mark.parametrize(
    ("kind", "way"), [("bfloat16", FLOATS), ("bfloat16", DOTS), ("Q8_0", FLOATS), ("Q4_0", FLOATS)]
)
def test_a_row_gets_the_same_bits_beside_any_others(kind: str, way: int) -> None:
    kernels, library = native_linear(activations="bf16"), build.load_kernels()
    assert kernels is not None and library is not None
    generator = torch.Generator().manual_seed(0)
    # The halves cancel out: what is left is how sums were rounded, in their order.
    weight = torch.randn(256, 1024, generator=generator).repeat(1, 2)
    half = torch.randn(100, 1024, generator=generator).bfloat16()
    x = torch.cat((half, -half), 1)
    if kind == "bfloat16":
        packed = kernels.pack(kind, [weight.bfloat16()])
    else:
        blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        packed = kernels.pack(kind, [torch.from_numpy(blocks)])
    layout = kernels.layout(kind, 2048)
    assert layout is not None

    def is_same(tokens: int) -> bool:
        rows = multiply(library, x[:tokens], None, packed, None, 256, layout)
        return torch.equal(rows[:1], multiply(library, x[:1], None, packed, None, 256, layout))

    if not library.piecework_choose_way(way):
        pytest.skip("this CPU has no dot products of bfloat16")
    library.piecework_set_batch_invariant(1)
    try:
        assert all(map(is_same, (2, 3, 13, 40, 100)))
        library.piecework_set_batch_invariant(0)
        # By dot products each sum is one chain in any case. Else this would show nothing.
        assert way == DOTS or not is_same(13)
    finally:
        library.piecework_set_batch_invariant(0)
        library.piecework_choose_way(-1)
