"""The simulated NPU is a torch device: tensors, modules, compilers and custom ops work on it and
compute what the CPU does.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

Function = Callable[..., Any]

WITH_ONE_INPUT: dict[str, Function] = {
    "add": lambda x: x + 1,
    "scalar tensor": lambda x: x * torch.tensor(2.0),
    "in place": lambda x: x.clone().mul_(3).sub_(x),
    "comparison": lambda x: (x > 0) & (x < 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "mask": lambda x: x[x > 0],
    "transpose": lambda x: x.t().contiguous() @ x,
    "slice": lambda x: x[1:, ::2] + 1,
    "view": lambda x: x.view(2, -1).unsqueeze(0).expand(3, -1, -1).reshape(-1),
    "split": lambda x: torch.cat(x.split([3, 5], -1)[::-1], -1),
    "chunk, stack": lambda x: torch.stack(x.chunk(2, -1)),
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "host index": lambda x: x[torch.tensor([2, 0])],
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1, 3], device=x.device),), x[:2]),
    "index_select": lambda x: x.index_select(1, torch.tensor([7, 0], device=x.device)),
    "gather": lambda x: x.gather(1, torch.tensor([[1], [2], [3], [4]], device=x.device)),
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "activations": lambda x: F.silu(x) + F.gelu(x) + x.relu() + x.sigmoid(),
    "reductions": lambda x: x.sum(-1) + x.mean(-1) + x.amax(-1) + x.square().sum().sqrt(),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: tuple(x.topk(3)),
    "sort": lambda x: tuple(x.sort()),
    "cumsum": lambda x: x.cumsum(0),
    "to half and back": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "matmul": lambda x: x.view(2, 2, 8) @ x.view(2, 8, 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 2, 2, 8)] * 3, is_causal=True
    ),
    "nonzero": lambda x: torch.nonzero(x > 0),
    "item": lambda x: torch.tensor(x.sum().item()),
    "list": lambda x: torch.tensor(x.tolist()),
    "triangle": lambda x: x.tril() + x.triu(1),
    "arange": lambda x: torch.arange(4, device=x.device) * x[:, 0],
    "factories": lambda x: (
        torch.zeros_like(x)
        + torch.ones(8, device=x.device)
        + torch.full((4, 1), 3.0, device=x.device)
    ),
}


def tensors(value: Any) -> list[torch.Tensor]:
    return [part.cpu() for part in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("name", WITH_ONE_INPUT)
def test_computes_what_the_cpu_does(simnpu: Any, name: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    for ours, theirs in zip(
        tensors(WITH_ONE_INPUT[name](x.to("npu"))), tensors(WITH_ONE_INPUT[name](x)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_modules_move_and_compute(simnpu: Any) -> None:
    ids = torch.tensor([3, 1, 4])
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    expected = model(ids)
    for module in (model.npu(), copy.deepcopy(model).to("npu")):
        assert {parameter.device for parameter in module.parameters()} == {simnpu.device}
        torch.testing.assert_close(module(ids.npu()).cpu(), expected)


def test_gradients_flow(simnpu: Any) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    layer(x).sum().backward()
    expected = copy.deepcopy(layer.weight.grad)
    layer = copy.deepcopy(layer).to("npu")
    layer.zero_grad()
    layer(x.npu()).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), expected)


def test_views_share_memory(simnpu: Any) -> None:
    x = torch.zeros(4, 8, device="npu")
    x[1:3, 4:].add_(1)
    x.t()[0].fill_(5)
    expected = torch.zeros(4, 8)
    expected[1:3, 4:].add_(1)
    expected.t()[0].fill_(5)
    assert torch.equal(x.cpu(), expected)


def test_save_and_load(simnpu: Any) -> None:
    x, file = torch.randn(4, 8), io.BytesIO()
    torch.save(x.npu(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == simnpu.device and torch.equal(loaded.cpu(), x)


def test_seeding_repeats_random_numbers(simnpu: Any) -> None:
    draws = []
    for _ in range(2):
        torch.npu.manual_seed(7)
        draws.append(torch.randn(5, device="npu").cpu())
    assert torch.equal(*draws)


def test_tensors_of_two_devices_do_not_mix(simnpu: Any) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="npu") + torch.ones(3)


@pytest.mark.parametrize("backend", ["ours", "aot_eager"])
def test_torch_compile(simnpu: Any, backend: str) -> None:
    devices = []

    def ours(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        devices.extend(example.device for example in examples if isinstance(example, torch.Tensor))
        return graph_module.forward

    weight = torch.randn(8, 8, device="npu")
    compiled = torch.compile(
        lambda x: F.silu(x @ weight) + 1,
        backend=ours if backend == "ours" else backend,
        fullgraph=True,
        dynamic=True,
    )
    for size in (3, 5):
        x = torch.randn(size, 8)
        torch.testing.assert_close(compiled(x.npu()).cpu(), F.silu(x @ weight.cpu()) + 1)
    assert set(devices) == ({simnpu.device} if backend == "ours" else set())


def test_dynamo_traces_through_a_custom_op(simnpu: Any) -> None:
    library = torch.library.Library("simnpu_test", "FRAGMENT")
    library.define("double(Tensor x, Tensor(a!) out) -> ()")

    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    library.impl("double", double, "PrivateUse1")
    library.impl("double", lambda x, out: None, "Meta")
    targets = []

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.simnpu_test.double(x, out)
        return out + 1

    assert function(torch.ones(3, device="npu")).tolist() == [3, 3, 3]
    assert "simnpu_test.double" in targets


def test_memory_is_poisoned_when_it_is_allocated(simnpu: Any) -> None:
    assert torch.empty(8, device="npu").isnan().all()
    assert torch.empty(8, dtype=torch.bfloat16, device="npu").isnan().all()
    assert (torch.empty(8, dtype=torch.int32, device="npu") == -1).all()


def test_memory_is_poisoned_when_it_is_freed(simnpu: Any) -> None:
    x = torch.ones(300, device="npu")
    weak = simnpu.weak_ref_tensor(x)
    assert weak.sum().item() == 300
    del x
    assert weak.isnan().all()


def test_memory_is_counted(emptied_simnpu: Any) -> None:
    allocated, (free, total) = torch.npu.memory_allocated(), torch.npu.mem_get_info()
    steps = (torch.npu.memory_reserved() - allocated) // 2**21 + 1
    x = torch.empty(
        steps * 2**21 + 2**20, dtype=torch.uint8, device="npu"
    )  # more than any block that is free
    assert torch.npu.memory_allocated() == allocated + x.nbytes <= torch.npu.max_memory_allocated()
    assert torch.npu.mem_get_info() == (free - (steps + 1) * 2**21, total), (
        "memory is taken in steps of 2 MiB"
    )
    del x
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() == allocated and torch.npu.mem_get_info() == (free, total)


def test_out_of_memory(emptied_simnpu: Any) -> None:
    free, _ = torch.npu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 2**21, dtype=torch.uint8, device="npu")


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.one_of(st.integers(1, 5000), st.integers(-10, -1)), max_size=40))
def test_live_tensors_never_overlap(simnpu: Any, steps: list[int]) -> None:
    """Positive: allocate so many floats; negative: free one of those that live."""
    live: list[tuple[int, torch.Tensor]] = []
    for number, step in enumerate(steps):
        if step > 0:
            live.append((number, torch.full((step,), float(number), device="npu")))
        elif live:
            live.pop(step % len(live))
    assert all((tensor == number).all() for number, tensor in live)


def test_no_waiting_allows_launches_and_copies_that_do_not_block(simnpu: Any) -> None:
    x, numbers = torch.ones(4, device="npu"), torch.tensor([1.0, 2, 3, 4]).pin_memory()
    with simnpu.no_waiting():
        y = x.add(numbers.to("npu", non_blocking=True)).relu()
        for wait in (
            y.cpu,
            y.sum().item,
            y.nonzero,
            torch.npu.synchronize,
            lambda: numbers.to("npu"),
            lambda: x[torch.tensor([0])],
        ):
            with pytest.raises(RuntimeError, match="waits for the device"):
                wait()
    assert y.tolist() == [2, 3, 4, 5]


def test_what_comes_to_the_host_is_there_once_it_has_waited(simnpu: Any) -> None:
    x, early, late = torch.arange(3.0, device="npu"), torch.npu.Event(), torch.npu.Event()
    first = torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    early.record()
    x.fill_(7)
    second = torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    late.record()
    assert first.isnan().all() and second.isnan().all() and not early.query()
    early.synchronize()
    assert first.tolist() == [0, 1, 2] and second.isnan().all()
    assert early.query() and not late.query()
    torch.npu.synchronize()
    assert second.tolist() == [7, 7, 7] and late.query()


def test_several_threads_may_wait_for_what_comes_to_the_host(simnpu: Any) -> None:
    """As those that load weights do, whatever a step that failed before has left in flight."""
    numbers = torch.arange(8.0)
    there = numbers.npu()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            coming = [torch.empty(8) for _ in range(200)]
            for each in coming:
                each.copy_(there, non_blocking=True)
            list(pool.map(lambda _: torch.empty(8, device="npu").copy_(numbers), range(16)))
            assert all(torch.equal(each, numbers) for each in coming)


def test_an_event_that_is_done_is_not_waited_for(simnpu: Any) -> None:
    never, done, open_ = (torch.npu.Event() for _ in range(3))
    done.record()
    torch.npu.synchronize()
    open_.record()
    with simnpu.no_waiting():
        never.synchronize()
        done.synchronize()
        with pytest.raises(RuntimeError, match="waits for the device"):
            open_.synchronize()
    open_.synchronize()


LACKING = [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", LACKING)
@pytest.mark.parametrize(
    "compute",
    [
        lambda dtype: torch.ones(2, device="npu").to(dtype),
        lambda dtype: torch.ones(2).to(dtype).npu().float(),
        lambda dtype: torch.ones(2).to(dtype).npu().neg(),
    ],
    ids=["narrowed", "widened", "negated"],
)
def test_numbers_that_the_device_lacks_are_not_computed(
    simnpu: Any, compute: Any, dtype: torch.dtype
) -> None:
    with pytest.raises(RuntimeError, match="compute units do not know"):
        compute(dtype)


@pytest.mark.parametrize("dtype", LACKING)
def test_numbers_that_the_device_lacks_are_moved(simnpu: Any, dtype: torch.dtype) -> None:
    x = torch.ones(2).to(dtype)
    assert torch.equal(x.npu().cpu().float(), torch.ones(2))


def test_waiting_is_counted(simnpu: Any) -> None:
    x = torch.ones(2, device="npu")
    before = simnpu.waits
    x.add_(1)
    assert simnpu.waits == before
    x.tolist()
    torch.npu.synchronize()
    assert simnpu.waits == before + 2
