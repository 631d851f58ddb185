"""Layers that keep all pages and those of a sliding window take them from one memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import (
    VariedRunner,
    arrivals_of,
    core_of,
    jobs_of_several,
    serve,
    sizes_of_all_kinds,
)
from toy_runner import SharedToyRunner, WindowedToyRunner, continuation, drain, make_core, tokens

from piecework.runtime.cache.slabs import SharedPages
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.core import EngineCore

LAYERS = [(1, 1, 1), (1, 3, 1), (2, 5, 2), (3, 1, 1), (1, 1, 3)]
"""That keep all, that keep a window's, and the least of pages in a slab."""


class VariedSharedRunner(VariedRunner, SharedToyRunner):
    """Logits that differ for every token."""


def least_slabs(shared: SharedPages, num_pages: int, page_size: int, token_budget: int) -> int:
    """As many as one request of all tokens may need, with its longest chunk."""
    chunk = -(-token_budget // page_size) + 1
    window = -(-(WindowedToyRunner.window - 1) // page_size) + 1 + chunk
    return shared.slabs(num_pages - 1, min(num_pages - 1, window)) + 1


@settings(deadline=None, max_examples=examples(12, exploring=30))
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=4
    ),
    flushes=st.frozensets(st.integers(0, 25), max_size=2),
    overlap=st.booleans(),
    spare=st.integers(0, 9),
    layers=st.sampled_from(LAYERS),
)
def test_whoever_takes_pages_from_whom_every_answer_is_its_own(
    jobs: list[Any],
    sizes: dict[str, Any],
    aborts: dict[int, list[str]],
    flushes: frozenset[int],
    overlap: bool,
    spare: int,
    layers: tuple[int, int, int],
) -> None:
    """The least of memory and more; no page is leaked or has two owners in any step."""
    shared = SharedPages.of(*layers)
    num_slabs = spare + least_slabs(
        shared, sizes["num_pages"], sizes["page_size"], sizes["token_budget"]
    )
    runner = partial(VariedSharedRunner, shared=shared, num_slabs=num_slabs)
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    core, _ = make_core(
        runner_class=runner, overlap=overlap, shared=shared, num_slabs=num_slabs, **sizes
    )
    for rid, answer in serve(core, arrivals, aborts, flushes).items():
        assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]
        assert answer.end is None or answer.end == whole[rid].end


def core_with(shared: SharedPages, num_slabs: int, **sizes: Any) -> EngineCore:
    runner = partial(SharedToyRunner, shared=shared, num_slabs=num_slabs)
    return make_core(runner_class=runner, page_size=1, shared=shared, num_slabs=num_slabs, **sizes)[
        0
    ]


def asked(rid: str, prompt: list[int], count: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=prompt, params=params)


@pytest.mark.parametrize(("prompt", "requests"), [(4, 8), (101, 1)], ids=["short", "long"])
def test_memory_goes_to_who_needs_it(prompt: int, requests: int) -> None:
    """127 pages: the short texts need 40 of windows at once, and the long one 102 of the others."""
    core = core_with(SharedPages.of(1, 1, 1), 128, num_pages=110, max_running_requests=20)
    for number in range(requests):
        core.add(asked(str(number), [number, *range(prompt - 1)], 2))
    most = 0
    while core.has_work:
        core.step()
        core.check()
        most = max(most, core.stats().running_requests)
    assert most == requests and core.stats().preemptions_total == 0


def test_a_prefix_that_lies_in_too_many_slabs_is_computed_again() -> None:
    """Pages of answers that grew side by side share slabs, which one of them keeps from windows."""
    shared = SharedPages.of(1, 3, 1)
    num_slabs = 50
    core = core_with(shared, num_slabs, num_pages=70, token_budget=16)
    prompts = [[number, 1] for number in range(3)]
    for number, prompt in enumerate(prompts):
        core.add(asked(str(number), prompt, 30))
    said = {rid: tokens(outputs) for rid, outputs in drain(core).items()}
    chat = [*prompts[0], *said["0"], *range(20)]
    core.add(asked("chat", chat, 5))
    outputs = drain(core, limit=100)["chat"]
    assert tokens(outputs) == continuation(chat, 5)
    assert outputs[0].cached_tokens == 0


def test_what_was_used_last_is_kept_of_either_kind() -> None:
    """A prefix stays found while others come that need its memory less than what lies idle."""
    shared = SharedPages.of(1, 1, 1)
    core = core_with(shared, 120, num_pages=100)
    prompt = list(range(20))

    def cached(rid: str, prompt: list[int]) -> int | None:
        core.add(asked(rid, prompt, 1))
        return drain(core)[rid][0].cached_tokens

    assert [cached("a", prompt), cached("b", prompt)] == [0, 19]
    for number in range(8):
        cached(f"other {number}", [50 + number] * 20)
        assert cached(f"again {number}", prompt) == 19
    assert cached("last", [50] * 20) == 0, "what nobody asked for again has given way"
