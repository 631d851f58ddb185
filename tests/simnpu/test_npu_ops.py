"""The npu and atb ops compute what their documentation says and refuse what hardware refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE, KV_HEADS, HEADS, HEAD_SIZE = 128, 2, 4, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(simnpu: Any, dtype: torch.dtype) -> None:
    x, gamma = torch.randn(3, 8, dtype=dtype), torch.rand(8, dtype=dtype)
    y, rstd = torch.ops.npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
    torch.testing.assert_close(y.cpu(), F.rms_norm(x.float(), (8,), gamma.float(), 1e-5).to(dtype))
    torch.testing.assert_close(
        rstd.cpu(), (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    )


def test_add_rms_norm(simnpu: Any) -> None:
    a, b, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    y, _, total = torch.ops.npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu())
    assert torch.equal(total.cpu(), a + b)
    torch.testing.assert_close(y.cpu(), F.rms_norm(a + b, (8,), gamma, 1e-6))


def test_swiglu(simnpu: Any) -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.ops.npu.npu_swiglu(x.npu()).cpu(), F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs(simnpu: Any, mode: str) -> None:
    x, angles = torch.randn(1, 5, 2, 8), torch.rand(5, 4)
    repeated = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, 1)
    cos, sin = repeated.cos()[None, :, None], repeated.sin()[None, :, None]
    y = torch.ops.npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), rotary_mode=mode).cpu()
    pairs = (
        (lambda t: torch.complex(*t.chunk(2, -1)))
        if mode == "half"
        else (lambda t: torch.complex(t[..., ::2], t[..., 1::2]))
    )
    torch.testing.assert_close(
        pairs(y), pairs(x) * torch.polar(torch.ones(5, 4), angles)[None, :, None]
    )


def test_rotary_mul_wants_four_dimensions(simnpu: Any) -> None:
    x = torch.randn(5, 8, device="npu")
    with pytest.raises(RuntimeError, match="4 dimensions"):
        torch.ops.npu.npu_rotary_mul(x, x, x)


class Cache:
    """Keys and values of a few pages on the host and on the device."""

    def __init__(self, page: int = PAGE) -> None:
        self.page = page
        self.keys, self.values = torch.randn(2, 9, page, KV_HEADS, HEAD_SIZE)
        self.mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()

    def attend(
        self,
        query: torch.Tensor,
        new: list[int],
        lengths: list[int],
        pages: torch.Tensor,
        **changes: Any,
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "atten_mask": self.mask,
            "actual_seq_lengths": torch.tensor(new).cumsum(0).tolist(),
            "actual_seq_lengths_kv": lengths,
            "block_table": pages.npu(),
            "num_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "input_layout": "TND",
            "block_size": self.page,
            "scale": HEAD_SIZE**-0.5,
            "sparse_mode": 3,
        } | changes
        keys, values = self.keys.npu().flatten(2), self.values.npu().flatten(2)
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(query.npu(), keys, values, **options)
        return out.cpu()

    def expected(
        self, query: torch.Tensor, new: list[int], lengths: list[int], pages: torch.Tensor
    ) -> torch.Tensor:
        parts, begin = [], 0
        for count, length, row in zip(new, lengths, pages, strict=True):
            keys, values = (
                c[row].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
                for c in (self.keys, self.values)
            )
            seen = torch.arange(length)[None] <= torch.arange(length - count, length)[:, None]
            heads = (
                tensor.transpose(0, 1) for tensor in (query[begin : begin + count], keys, values)
            )
            parts.append(F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(0, 1))
            begin += count
        return torch.cat(parts)


@settings(max_examples=8, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 250)), min_size=1, max_size=4),
    swapped=st.booleans(),
)
def test_fused_attention(simnpu: Any, requests: list[tuple[int, int]], swapped: bool) -> None:
    cache, new = Cache(), [count for count, _ in requests]
    lengths, pages = (
        [count + before for count, before in requests],
        torch.arange(8, dtype=torch.int32).view(4, 2)[: len(new)],
    )
    query = torch.randn(sum(new), HEADS, HEAD_SIZE)
    if swapped:
        cache.keys, cache.values = cache.values, cache.keys
    torch.testing.assert_close(
        cache.attend(query, new, lengths, pages), cache.expected(query, new, lengths, pages)
    )


def test_fused_attention_of_a_cache_with_heads_before_tokens(simnpu: Any) -> None:
    cache, query, pages = (
        Cache(),
        torch.randn(3, HEADS, HEAD_SIZE),
        torch.tensor([[2]], dtype=torch.int32),
    )
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        query.npu(),
        cache.keys.transpose(1, 2).npu(),
        cache.values.transpose(1, 2).npu(),
        atten_mask=cache.mask,
        actual_seq_lengths=[3],
        actual_seq_lengths_kv=[5],
        block_table=pages.npu(),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="TND",
        block_size=PAGE,
        scale=HEAD_SIZE**-0.5,
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    torch.testing.assert_close(out.cpu(), cache.expected(query, [3], [5], pages))
    assert lse.shape == (3, HEADS, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"atten_mask": None}, "needs an atten_mask of 2048 x 2048"),
        ({"sparse_mode": 2}, "sparse_mode 0 and 3 only"),
        ({"input_layout": "BSH"}, "layout TND"),
        ({"actual_seq_lengths_kv": None}, "needs actual_seq_lengths"),
        ({"actual_seq_lengths": [2]}, "must rise to T = 3"),
        ({"actual_seq_lengths_kv": [5, 5]}, "one length"),
        ({"actual_seq_lengths_kv": [129]}, "129 tokens need 2"),
        ({"num_heads": 2, "num_key_value_heads": 2}, "query must be"),
        ({"block_size": 256}, "has not block_size 256"),
    ],
)
def test_fused_attention_refuses(simnpu: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Cache().attend(
            torch.randn(3, HEADS, HEAD_SIZE),
            [3],
            [5],
            torch.tensor([[2]], dtype=torch.int32),
            **changes,
        )


def test_fused_attention_refuses_a_mask_upside_down(simnpu: Any) -> None:
    cache = Cache()
    mask = torch.ones(2048, 2048, dtype=torch.bool).tril().npu()
    with pytest.raises(RuntimeError, match="above the diagonal"):
        cache.attend(
            torch.randn(3, HEADS, HEAD_SIZE),
            [3],
            [5],
            torch.tensor([[2]], dtype=torch.int32),
            atten_mask=mask,
        )


def test_fused_attention_refuses_int64_pages(simnpu: Any) -> None:
    with pytest.raises(RuntimeError, match="block_table must be int32"):
        Cache().attend(torch.randn(3, HEADS, HEAD_SIZE), [3], [5], torch.tensor([[2]]))


def test_prefill_needs_pages_of_128_tokens(simnpu: Any) -> None:
    with pytest.raises(RuntimeError, match="multiple of 128"):
        Cache(16).attend(
            torch.randn(3, HEADS, HEAD_SIZE), [3], [5], torch.tensor([[2]], dtype=torch.int32)
        )


def test_decode_needs_pages_of_sixteens_only(simnpu: Any) -> None:
    cache, pages = Cache(16), torch.tensor([[2, 4], [1, 3]], dtype=torch.int32)
    query = torch.randn(2, HEADS, HEAD_SIZE)
    torch.testing.assert_close(
        cache.attend(query, [1, 1], [17, 3], pages), cache.expected(query, [1, 1], [17, 3], pages)
    )


def test_paged_attention(simnpu: Any) -> None:
    cache, pages = Cache(), torch.tensor([[2, 4], [1, 3]], dtype=torch.int32)
    query, out = torch.randn(2, HEADS, HEAD_SIZE), torch.empty(2, HEADS, HEAD_SIZE, device="npu")
    lengths = torch.tensor([129, 3], dtype=torch.int32)
    torch.ops.atb._npu_paged_attention(
        query.npu(),
        cache.keys.npu(),
        cache.values.npu(),
        KV_HEADS,
        HEADS,
        HEAD_SIZE**-0.5,
        pages.npu(),
        lengths,
        out,
    )
    torch.testing.assert_close(out.cpu(), cache.expected(query, [1, 1], [129, 3], pages))


def test_reshape_and_cache(simnpu: Any) -> None:
    cache = Cache()
    keys, values = cache.keys.npu(), cache.values.npu()
    key, value, slots = (
        *torch.randn(2, 3, KV_HEADS, HEAD_SIZE),
        torch.tensor([130, 5, 1151], dtype=torch.int32),
    )
    torch.ops.atb._npu_reshape_and_cache(key.npu(), value.npu(), keys, values, slots.npu())
    cache.keys.flatten(0, 1)[slots.long()], cache.values.flatten(0, 1)[slots.long()] = key, value
    assert torch.equal(keys.cpu(), cache.keys) and torch.equal(values.cpu(), cache.values)


def test_reshape_and_cache_refuses_a_slot_that_is_not(simnpu: Any) -> None:
    cache, token = Cache(), torch.randn(1, KV_HEADS, HEAD_SIZE, device="npu")
    for slot in (-1, 9 * PAGE):
        slots = torch.tensor([slot], dtype=torch.int32, device="npu")
        with pytest.raises(RuntimeError, match="no such slot"):
            torch.ops.atb._npu_reshape_and_cache(
                token, token, cache.keys.npu(), cache.values.npu(), slots
            )


def test_ops_have_no_cpu_kernel(simnpu: Any) -> None:
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch.ops.npu.npu_swiglu(torch.randn(3, 8))


def test_ops_can_be_traced_where_torch_npu_has_meta_kernels(simnpu: Any) -> None:
    targets = []

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        targets.extend(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    compiled = torch.compile(
        lambda x: torch.ops.npu.npu_swiglu(x) + 1, backend=backend, fullgraph=True
    )
    assert compiled(torch.zeros(3, 8, device="npu")).shape == (3, 4)
    assert "npu.npu_swiglu" in targets
