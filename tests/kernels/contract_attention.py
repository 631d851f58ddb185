"""What every attention backend must do. A test file imports these tests and defines the fixture
`kind`:

    from contract_attention import *

    @pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
    def kind(request: pytest.FixtureRequest) -> Kind: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step, latent, quantized

from piecework.kernels import cache_format
from piecework.kernels.attention import AttentionBackend, GraphAttention

Lens = list[tuple[int, int]]
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def usual_errors(backend: AttentionBackend, dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 10 * EXACT[dtype], "rtol": EXACT[dtype]}


def requests(new: int, past: int, most: int) -> st.SearchStrategy[Lens]:
    """Up to `most` requests: decodes, whole prompts and chunks of prompts."""
    lens = st.one_of(st.just(1), st.integers(1, new)), st.one_of(st.just(0), st.integers(0, past))
    return st.lists(st.tuples(*lens), min_size=1, max_size=most)


LENS = requests(40, 50, 4)


@dataclass(frozen=True)
class Kind:
    """A kind of backend, and what it supports.

    Attributes:
        make: Returns the backends of the kind, all of which must give the same.
        examples: Examples of each property; few if the backend is slow here.
        lens: (new tokens, past tokens) of a request.
        groups: Query heads per key/value head.
        modifies: Whether it supports soft caps, sinks and slopes.
        checks_plans: Whether it refuses steps that a recorded plan cannot hold.
        cuts_groups: Whether the first and the last group of heads may be incomplete.
        errors: Tolerances of a backend's results of a dtype.
    """

    name: str
    make: Callable[[], Sequence[AttentionBackend]]
    device: str = "cpu"
    examples: int = 20
    lens: st.SearchStrategy[Lens] = LENS
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    page_sizes: Sequence[int] = (1, 3, 16)
    kv_heads: Sequence[int] = (1, 2, 3)
    groups: Sequence[int] = (1, 3, 4, 7)
    head_sizes: Sequence[int] = (8, 24)
    cache_dtypes: Sequence[torch.dtype] = ()
    latent_sizes: Sequence[tuple[int, int]] = ()
    modifies: bool = True
    checks_plans: bool = True
    cuts_groups: bool = False
    errors: Callable[[AttentionBackend, torch.dtype], dict[str, float]] = usual_errors

    def steps(self, lens: st.SearchStrategy[Lens] | None = None) -> st.SearchStrategy[Step]:
        return st.builds(
            lambda lens, page_size, kv_heads, group, head_size, dtype, seed: Step(
                lens,
                page_size=page_size,
                heads=kv_heads * group,
                kv_heads=kv_heads,
                head_size=head_size,
                dtype=dtype,
                seed=seed,
                device=self.device,
            ),
            self.lens if lens is None else lens,
            st.sampled_from(self.page_sizes),
            st.sampled_from(self.kv_heads),
            st.sampled_from(self.groups),
            st.sampled_from(self.head_sizes),
            st.sampled_from(self.dtypes),
            st.integers(0, 5),
        )

    def each(self, check: Callable[..., None], share: float = 1, **strategies: Any) -> None:
        """Run `check` with examples of the strategies."""
        number = max(2, int(share * self.examples))
        settings(max_examples=number)(given(**strategies)(check))()

    def step(self, lens: Lens, **sizes: Any) -> Step:
        usual: dict[str, Any] = {
            "page_size": self.page_sizes[-1],
            "heads": 4,
            "kv_heads": 2,
            "head_size": self.head_sizes[0],
            "dtype": self.dtypes[0],
            "device": self.device,
        }
        return Step(lens, **usual | sizes, seed=1)

    def assert_same(
        self, backend: AttentionBackend, actual: torch.Tensor, expected: torch.Tensor
    ) -> None:
        errors = self.errors(backend, actual.dtype)
        torch.testing.assert_close(actual.cpu().double(), expected, **errors, equal_nan=True)


PASTS = st.lists(st.integers(0, 60), min_size=1, max_size=4)
WINDOWS = st.sampled_from([None, None, 1, 5, 50, 100])


def test_attention_equals_the_definition(kind: Kind) -> None:
    """Prompts, chunks, decodes and mixed steps, whose pages lie in any order."""

    def check(step: Step, window: int | None, padding: int) -> None:
        expected = step.expected(window)
        for backend in kind.make():
            out = step.run(backend, window=window, padding=padding)
            kind.assert_same(backend, out, expected)
            keys, values = step.stored()
            assert torch.equal(keys, step.new(step.keys))
            assert torch.equal(values, step.new(step.values))

    kind.each(check, 2, step=kind.steps(), window=WINDOWS, padding=st.integers(0, 3))


def test_soft_caps_sinks_and_slopes_are_those_of_the_definition(kind: Kind) -> None:
    if not kind.modifies:
        pytest.skip("plain attention only")

    def check(
        step: Step,
        window: int | None,
        softcap: float | None,
        sink: float | None,
        slope: float | None,
    ) -> None:
        heads = torch.arange(step.heads.num_heads, device=kind.device)
        step.heads = replace(
            step.heads,
            softcap=softcap,
            sinks=None if sink is None else sink + heads / 4,
            slopes=None if slope is None else slope / (1 + heads),
        )
        expected = step.expected(window)
        for backend in kind.make():
            kind.assert_same(backend, step.run(backend, window=window), expected)

    kind.each(
        check,
        step=kind.steps(),
        window=WINDOWS,
        softcap=st.sampled_from([None, 0.5, 30.0]),
        sink=st.sampled_from([None, -1e4, 0.0, 3.0, 1e4]),
        slope=st.sampled_from([None, 0.0, 0.01, 0.5]),
    )


def test_a_cache_of_8_bits_is_written_and_read_as_by_the_reference(kind: Kind) -> None:
    """A step reads its own tokens as they are stored, so chunks of a prompt change nothing."""

    def check(
        step: Step,
        window: int | None,
        padding: int,
        cache: torch.dtype,
        scales: tuple[float, float],
    ) -> None:
        step, keys, values = quantized(step, cache, scales)
        before, new = (step.k_cache, step.v_cache), (step.keys, step.values)
        wanted = [each.clone() for each in before]
        for tokens, part, scale in zip(new, wanted, scales, strict=True):
            cache_format.store(step.new(tokens), part, step.metadata.slot_mapping, scale)
        step.keys, step.values = keys, values
        expected = step.expected(window)
        step.keys, step.values = new
        for backend in kind.make():
            step.k_cache, step.v_cache = (each.clone() for each in before)
            out = step.run(backend, window=window, padding=padding)
            # Padding may be stored in page 0, which belongs to no request.
            for found, part in zip((step.k_cache, step.v_cache), wanted, strict=True):
                assert torch.equal(found[1:].view(torch.uint8), part[1:].view(torch.uint8))
            kind.assert_same(backend, out, expected)

    if not kind.cache_dtypes:
        pytest.skip("no caches of 8 bits")
    for cache in kind.cache_dtypes:
        kind.each(
            check,
            0.5,
            step=kind.steps(),
            window=WINDOWS,
            padding=st.integers(0, 2),
            cache=st.just(cache),
            scales=st.sampled_from([(1.0, 1.0), (0.5, 0.03)]),
        )


def test_values_of_latent_layers_are_the_beginnings_of_keys(kind: Kind) -> None:
    if not kind.latent_sizes:
        pytest.skip("no latent layers")

    def check(
        lens: Lens, page_size: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> None:
        shape: dict[str, Any] = {"heads": heads, "kv_heads": 1, "head_size": sizes[0]}
        step = latent(kind.step(lens, page_size=page_size, dtype=dtype, **shape), sizes[1])
        expected = step.expected()
        for backend in kind.make():
            kind.assert_same(backend, step.run(backend, padding=2), expected)
            assert torch.equal(step.stored()[0], step.new(step.keys))

    kind.each(
        check,
        0.5,
        lens=kind.lens,
        page_size=st.sampled_from(kind.page_sizes),
        heads=st.sampled_from([1, 4, 5, 40]),
        sizes=st.sampled_from(kind.latent_sizes),
        dtype=st.sampled_from(kind.dtypes),
    )


def test_the_first_and_the_last_group_of_heads_may_be_incomplete(kind: Kind) -> None:
    """A rank that shares a key/value head unevenly has such groups."""
    if not kind.cuts_groups:
        pytest.skip("whole groups only")

    def check(step: Step, cut: tuple[int, int]) -> None:
        group, heads = step.heads.group, step.heads.num_heads
        skipped, missing = (number % group for number in cut)
        if skipped + missing >= heads:
            return
        step.q = step.q[:, skipped : heads - missing].contiguous()
        step.heads = replace(
            step.heads, num_heads=step.q.shape[1], group_size=group, skipped_heads=skipped
        )
        expected = step.expected()
        for backend in kind.make():
            kind.assert_same(backend, step.run(backend, padding=2), expected)

    kind.each(check, 0.5, step=kind.steps(), cut=st.tuples(st.integers(0, 7), st.integers(0, 7)))


def test_rows_that_no_request_wrote_reach_no_request(kind: Kind) -> None:
    """The steps of the other tests have NaN in these rows."""
    for window in (None, 3):
        step = kind.step([(1, 3), (1, 20), (4, 5), (1, 0)])
        for cache in (step.k_cache, step.v_cache):
            cache.nan_to_num_(nan=float("inf"))
            cache[0] = float("-inf")
        for backend in kind.make():
            kind.assert_same(backend, step.run(backend, window=window), step.expected(window))


def test_a_key_that_is_nan_reaches_only_the_queries_that_see_it(kind: Kind) -> None:
    step = kind.step([(20, 0), (3, 10)])
    step.keys[0][12] = float("nan")
    for backend in kind.make():
        out = step.run(backend)
        assert out[12:20].isnan().all()
        assert torch.cat([out[:12], out[20:]]).isfinite().all()


def graph_backends(kind: Kind) -> list[GraphAttention]:
    made = [each for each in kind.make() if isinstance(each, GraphAttention)]
    return made or pytest.skip("no plans for graphs")


def addresses(plan: Any) -> list[int]:
    parts = [getattr(plan, each.name) for each in fields(plan)] if is_dataclass(plan) else plan
    return [each.data_ptr() for each in parts if isinstance(each, torch.Tensor)]


def run_planned(
    backend: GraphAttention, step: Step, plan: Any, rows: int, window: int | None = None
) -> torch.Tensor:
    """Return what a recorded step of `rows` rows gives. Those after the requests hold 7."""
    q, k, v = (
        torch.cat((part, part.new_full((rows - len(part), *part.shape[1:]), 7.0)))
        for part in (step.q, step.new(step.keys), step.new(step.values))
    )
    out = torch.full_like(q, float("nan"))
    backend.run(q, k, v, out, step.k_cache, step.v_cache, plan, step.layout(window))
    return out


def test_one_plan_serves_steps_of_any_size(kind: Kind) -> None:
    """Steps one after another: a step sees nothing of a longer one before it."""

    def check(
        pasts: list[list[int]],
        spare: int,
        group: int,
        window: int | None,
        cache: torch.dtype | None,
    ) -> None:
        for backend in graph_backends(kind):
            page_size = kind.page_sizes[-1]
            plan = backend.capture_plan(8, 61, page_size, torch.device(kind.device))
            before = addresses(plan)
            for past in pasts:
                rows = len(past) + spare
                step = kind.step([(1, each) for each in past], heads=2 * group)
                wanted = (step.keys, step.values)
                if cache is not None:
                    step, *wanted = quantized(step, cache)
                unwritten = step.k_cache.clone()
                backend.update_plan(plan, step.metadata, rows)
                out = run_planned(backend, step, plan, rows, window)
                places = torch.ones(step.k_cache.shape[:2], dtype=torch.bool)
                places[0] = False
                places.flatten()[step.metadata.slot_mapping.cpu().long()] = False
                if cache is None:
                    assert torch.equal(step.stored()[0], step.new(step.keys))
                    found, other = (each.cpu()[places] for each in (step.k_cache, unwritten))
                    assert torch.equal(found.nan_to_num(), other.nan_to_num())
                step.keys, step.values = wanted
                kind.assert_same(backend, out[: len(past)], step.expected(window))
                assert out.isfinite().all()
            assert addresses(plan) == before

    kind.each(
        check,
        pasts=st.lists(
            st.lists(st.integers(0, 60), min_size=1, max_size=4), min_size=2, max_size=3
        ),
        spare=st.integers(0, 3),
        group=st.sampled_from(kind.groups),
        window=st.sampled_from([None, 7]),
        cache=st.sampled_from([None, *kind.cache_dtypes]),
    )


def test_a_plan_that_was_never_updated_describes_no_request(kind: Kind) -> None:
    for backend in graph_backends(kind):
        step = kind.step([(1, 9), (1, 3)])
        before = step.k_cache.clone()
        plan = backend.capture_plan(2, 4, kind.page_sizes[-1], torch.device(kind.device))
        out = run_planned(backend, step, plan, 2)
        assert out.isfinite().all()
        found, other = (each[1:].cpu().nan_to_num() for each in (step.k_cache, before))
        assert torch.equal(found, other)


def test_a_plan_refuses_what_it_cannot_hold(kind: Kind) -> None:
    if not kind.checks_plans:
        pytest.skip("plans of the CPU are not recorded by address")
    page_size = kind.page_sizes[-1]
    for backend in graph_backends(kind):
        plan = backend.capture_plan(1, 2, page_size, torch.device(kind.device))
        for lens in ([(2, 0)], [(1, 1), (1, 1)], [(1, 5 * page_size)]):
            with pytest.raises((AssertionError, RuntimeError)):
                backend.update_plan(plan, kind.step(lens).metadata, 1)
