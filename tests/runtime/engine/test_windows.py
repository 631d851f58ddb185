"""Models with sliding windows: layers that have one keep the pages of a window, and no query misses
one of them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from served_answers import arrivals_of, core_of, jobs_of_several, serve, sizes_of_all_kinds
from toy_runner import WindowedToyRunner, continuation, drain, make_core, tokens

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams


@settings(deadline=None, max_examples=15)
@given(
    jobs=jobs_of_several,
    sizes=sizes_of_all_kinds,
    aborts=st.dictionaries(
        st.integers(0, 25), st.lists(st.integers(0, 9).map("r{}".format), max_size=3), max_size=4
    ),
    overlap=st.booleans(),
    spare=st.integers(0, 9),
    state_slots=st.sampled_from([0, 9]),
)
def test_no_window_misses_a_page(
    jobs: list[Any],
    sizes: dict[str, Any],
    aborts: dict[int, list[str]],
    overlap: bool,
    spare: int,
    state_slots: int,
) -> None:
    """The least of pages, and up to as many as the other layers have; with recurrent layers too."""
    page_size, num_pages = sizes["page_size"], sizes["num_pages"]
    least = -(-(WindowedToyRunner.window - 1) // page_size) + 1
    least += -(-sizes["token_budget"] // page_size) + 1
    window_pages = min(num_pages, least + spare + 1)
    arrivals = arrivals_of(jobs)
    whole = serve(core_of(False, **sizes), arrivals)
    core = core_of(overlap, **sizes, window_pages=window_pages, state_slots=state_slots)
    for rid, answer in serve(core, arrivals, aborts).items():
        assert answer.tokens == whole[rid].tokens[: len(answer.tokens)]
        assert answer.end is None or answer.end == whole[rid].end


def asked(rid: str, prompt: list[int], count: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=prompt, params=params)


def test_a_long_request_holds_its_window_and_a_chunk() -> None:
    core, _ = make_core(
        page_size=1, num_pages=300, token_budget=16, runner_class=WindowedToyRunner,
        window_pages=300, share_prefixes=False,
    )  # fmt: skip
    core.add(asked("r", [n % 7 for n in range(100)], 100))
    most = 0
    while core.has_work:
        core.step()
        core.check()
        held = [len(each.window) - each.window_begin for each in core._scheduler.running]
        most = max([most, *held])
    assert most == 4 + 16


def test_a_chunk_is_cut_to_the_pages_of_windows_that_are_left() -> None:
    core, runner = make_core(
        page_size=1, num_pages=300, token_budget=16, runner_class=WindowedToyRunner,
        window_pages=19, share_prefixes=False,
    )  # fmt: skip
    core.add(asked("first", [n % 7 for n in range(10)], 40))
    for _ in range(3):
        core.step()
    core.add(asked("second", [n % 5 for n in range(30)], 3))
    core.step()
    assert core.stats().running_requests == 2 and runner.step_tokens[-1] > 10
    outputs = drain(core)
    assert tokens(outputs["second"]) == continuation([n % 5 for n in range(30)], 3)
    assert core.stats().preemptions_total == 0


def test_a_prefix_is_found_as_far_as_the_window_before_its_end_is_kept() -> None:
    core, _ = make_core(
        num_pages=300, runner_class=lambda *sizes: WindowedToyRunner(*sizes, 16), window_pages=16
    )
    prompt = [3 * n % 50 for n in range(44)]

    def cached(prompt: list[int], count: int = 1) -> int:
        core.add(asked("r", prompt, count))
        outputs = drain(core)["r"]
        assert tokens(outputs) == continuation(prompt, count)
        return outputs[0].cached_tokens

    assert [cached(prompt), cached(prompt)] == [0, 40]
    assert cached(prompt[:20] + [9] * 9) == 20, (
        "what is behind no window is kept while there is room"
    )
    assert cached([8] * 40) == 0
    assert cached(prompt) == 40, "of the first prompt the last window was used last"
    assert cached(prompt[:12] + [7] * 9) == 0, "its beginning has given way"


def test_a_chat_goes_on_behind_its_answer() -> None:
    core, _ = make_core(num_pages=300, runner_class=WindowedToyRunner, window_pages=300)
    prompt = list(range(10))
    core.add(asked("one", prompt, 30))
    said = tokens(drain(core)["one"])
    core.add(asked("two", [*prompt, *said, 5, 6], 1))
    assert drain(core)["two"][0].cached_tokens == 36
