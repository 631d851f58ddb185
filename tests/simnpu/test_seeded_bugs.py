"""Each mistake that Ascend hardware punishes is caught on the simulated NPU, and its correct form
passes.

Two more, an output in a fresh tensor and a result of one size overwritten by another, are seeded in
test_pieces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

PAGE, KV_HEADS, HEADS, HEAD_SIZE = 128, 2, 4, 8


def capture(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = function()
    return graph, result


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, PAGE, KV_HEADS, HEAD_SIZE, device="npu"), torch.zeros(
        4, PAGE, KV_HEADS, HEAD_SIZE, device="npu"
    )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cache_locations_must_be_int32(simnpu: Any, dtype: torch.dtype, captured: bool) -> None:
    token, (keys, values) = torch.ones(2, KV_HEADS, HEAD_SIZE, device="npu"), caches()
    slots = torch.tensor([130, 131], dtype=dtype, device="npu")

    def store() -> None:
        torch.ops.atb._npu_reshape_and_cache(token, token, keys, values, slots)

    def run() -> None:
        capture(store)[0].replay() if captured else store()

    if dtype == torch.int64:
        with pytest.raises(RuntimeError, match="slot_indices must be int32"):
            run()
    else:
        run()
        assert keys[1, 2:4].sum().item() == token.numel()


def test_cache_locations_must_lie_on_the_device(simnpu: Any) -> None:
    token = torch.ones(2, KV_HEADS, HEAD_SIZE, device="npu")
    with pytest.raises(RuntimeError, match="slot_indices is on cpu"):
        torch.ops.atb._npu_reshape_and_cache(
            token, token, *caches(), torch.zeros(2, dtype=torch.int32)
        )


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_decode_lengths_must_lie_on_the_host(simnpu: Any, device: str) -> None:
    query, out = (
        torch.ones(1, HEADS, HEAD_SIZE, device="npu"),
        torch.empty(1, HEADS, HEAD_SIZE, device="npu"),
    )
    pages = torch.tensor([[1]], dtype=torch.int32, device="npu")
    lengths = torch.tensor([3], dtype=torch.int32, device=device)

    def decode() -> None:
        torch.ops.atb._npu_paged_attention(
            query, *caches(), KV_HEADS, HEADS, 1.0, pages, lengths, out
        )

    if device == "npu":
        with pytest.raises(RuntimeError, match="context_lens must be a host tensor"):
            decode()
    else:
        decode()
        assert (out == 0).all()


def attend(lengths: Any) -> torch.Tensor:
    keys, values = caches()
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        torch.ones(1, HEADS, HEAD_SIZE, device="npu"),
        keys.flatten(2),
        values.flatten(2),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device="npu"),
        actual_seq_lengths=[1],
        actual_seq_lengths_kv=lengths,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="TND",
        block_size=PAGE,
    )
    return out


def test_attention_lengths_on_the_device_cannot_be_captured(simnpu: Any) -> None:
    lengths = torch.tensor([3], device="npu")
    # The allocator goes on asking a graph whose capture was lost, so it must not die.
    lost = torch.npu.NPUGraph()
    with (
        pytest.raises(RuntimeError, match="invalidated by reading a value of the device"),
        torch.npu.graph(lost),
    ):
        attend(lengths)
    capture(lambda: attend([3]))


def test_attention_lengths_on_the_device_make_the_host_wait(simnpu: Any) -> None:
    """Outside of a capture torch turns them into a list without a word, so a step that must not
    wait asks for the proof.
    """
    lengths = torch.tensor([3], device="npu")
    with simnpu.no_waiting():
        with pytest.raises(RuntimeError, match="waits for the device"):
            attend(lengths)
        attend([3])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.to("cpu"),
        lambda x: torch.npu.synchronize(),
        lambda x: torch.npu.current_stream().synchronize(),
        lambda x: torch.tensor([1, 2], device="npu"),
        lambda x: x[torch.tensor([0, 1])],
    ],
    ids=lambda read: None,
)
def test_waiting_for_the_device_in_a_capture(
    simnpu: Any, read: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.ones(4, device="npu")
    read(x)
    with pytest.raises(RuntimeError, match="invalidated"):
        capture(lambda: read(x))


def test_an_op_that_torch_npu_runs_on_the_cpu_in_a_capture(simnpu: Any) -> None:
    x = torch.rand(4, device="npu") + 1
    torch.testing.assert_close(x.lgamma().cpu(), x.cpu().lgamma())
    with pytest.raises(RuntimeError, match=r"aten::lgamma.out, which torch_npu runs on the CPU"):
        capture(lambda: x.lgamma())


def test_an_op_with_a_kernel_although_its_out_form_has_none(simnpu: Any) -> None:
    x, index = torch.randn(4, device="npu"), torch.tensor([2, 0], device="npu")
    graph, y = capture(lambda: x[index])
    graph.replay()
    assert torch.equal(y.cpu(), x.cpu()[[2, 0]])


def test_capture_on_the_default_stream(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="non-default stream"):
        capture(lambda: x + 1, stream=torch.npu.default_stream())
    capture(lambda: x + 1, stream=torch.npu.Stream())


@pytest.fixture(scope="module")
def library(simnpu: Any) -> Iterator[torch.library.Library]:
    library = torch.library.Library("seeded_bugs", "DEF")
    library.define("increment(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl("increment", lambda x: x + 1, key)
    yield library


def test_an_op_not_registered_for_private_use_1(
    simnpu: Any, library: torch.library.Library
) -> None:
    x = torch.ones(4, device="npu")
    with pytest.raises(NotImplementedError, match="no kernel is registered for PrivateUse1"):
        torch.ops.seeded_bugs.increment(x)
    library.impl("increment", lambda x: x + 1, "PrivateUse1")
    assert torch.ops.seeded_bugs.increment(x).tolist() == [2, 2, 2, 2]


def test_replay_without_update(simnpu: Any) -> None:
    query, out = (
        torch.ones(1, HEADS, HEAD_SIZE, device="npu"),
        torch.empty(1, HEADS, HEAD_SIZE, device="npu"),
    )
    pages, (keys, values) = torch.tensor([[1]], dtype=torch.int32, device="npu"), caches()
    values[1, :4] = torch.tensor([1.0, 3.0, 5.0, 7.0], device="npu")[:, None, None]

    def decode() -> None:
        lengths = torch.tensor([1], dtype=torch.int32)
        torch.ops.atb._npu_paged_attention(
            query, keys, values, KV_HEADS, HEADS, 1.0, pages, lengths, out
        )

    graph, _ = capture(decode, auto_dispatch_capture=True)
    with simnpu.limits(hang_seconds=0.05), pytest.raises(RuntimeError, match="hardware would hang"):
        graph.replay()
        torch.npu.synchronize()
    graph.update([{"context_lens": torch.tensor([4], dtype=torch.int32)}])
    graph.replay()
    torch.testing.assert_close(out.cpu(), torch.full((1, HEADS, HEAD_SIZE), 4.0))


def test_lengths_captured_without_auto_dispatch_stay_what_they_were(simnpu: Any) -> None:
    query, out = (
        torch.ones(1, HEADS, HEAD_SIZE, device="npu"),
        torch.empty(1, HEADS, HEAD_SIZE, device="npu"),
    )
    pages, (keys, values) = torch.tensor([[1]], dtype=torch.int32, device="npu"), caches()
    values[1, :4] = torch.tensor([1.0, 3.0, 5.0, 7.0], device="npu")[:, None, None]
    lengths = torch.tensor([1], dtype=torch.int32)
    graph, _ = capture(
        lambda: torch.ops.atb._npu_paged_attention(
            query, keys, values, KV_HEADS, HEADS, 1.0, pages, lengths, out
        )
    )
    lengths.fill_(4)
    graph.replay()
    torch.testing.assert_close(out.cpu(), torch.full((1, HEADS, HEAD_SIZE), 1.0))


@pytest.mark.parametrize("dropped", [False, True])
def test_an_input_that_was_freed_after_the_capture(simnpu: Any, dropped: bool) -> None:
    x = torch.ones(64, device="npu")
    graph, y = capture(lambda: x + 1)
    if dropped:
        del x
    graph.replay()
    assert y.isnan().all() if dropped else (y == 2).all()
    if dropped:
        with (
            simnpu.strict_addresses(),
            pytest.raises(RuntimeError, match="freed after the capture"),
        ):
            graph.replay()


def test_pool_reuse_across_sizes(simnpu: Any) -> None:
    pool, x = torch.npu.graph_pool_handle(), torch.ones(64, device="npu")
    graphs = {}
    for size in (64, 32):
        graph, y = capture(lambda size=size: x[:size] * size, pool=pool)
        graphs[size] = graph, simnpu.weak_ref_tensor(y)
        del y
    graph, result = graphs[64]
    graph.replay()
    assert result.tolist() == [64] * 64
    graphs[32][0].replay()
    assert result.tolist() != [64] * 64, "the other size's replay wrote over it"
    graph.replay()
    assert result.tolist() == [64] * 64


@pytest.mark.parametrize("where", ["cpu", "npu"])
def test_a_0_dim_cpu_tensor_is_baked_in(simnpu: Any, where: str) -> None:
    x, factor = torch.ones(4, device="npu"), torch.tensor(2.0, device=where)
    graph, y = capture(lambda: x * factor)
    factor.fill_(7)
    graph.replay()
    assert y.tolist() == ([2] * 4 if where == "cpu" else [7] * 4)


def test_a_wrong_keyword(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch.ops.npu.npu_rms_norm(x, x, eps=1e-5)
    torch.ops.npu.npu_rms_norm(x, x, epsilon=1e-5)
