"""What the tokens of a step become on the text side, and how a request resumes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from piecework.runtime.core.generation import FinishReason, TokenLogprob, TokenOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.output_processor import (
    RequestOutput,
    RequestState,
    TextOptions,
    merge,
    process_outputs,
)
from piecework.runtime.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer(TokenizerData(backend=byte_level()))
IM_END = TOKENIZER.backend.token_to_id("<|im_end|>")
PROMPT = TOKENIZER.encode("Q: what's that?\n")
STORY = "The quick brown fox, naïve 😀 東京.\n\nQ: END of it"


class Sequence:
    """A request, and what each step's output gave whoever waits for it."""

    def __init__(self, **text: Any) -> None:
        self.state = RequestState(
            "r",
            PROMPT,
            SamplingParams(),
            TOKENIZER,
            text=TextOptions(**text),
            priority=3,
            arrival_time=7.5,
        )
        self.delivered: list[RequestOutput] = []
        self.state.deliver = self.delivered.append

    def push(self, output: TokenOutput) -> RequestOutput:
        count = len(self.delivered)
        ended, _ = process_outputs({"r": self.state}, [output])
        (result,) = self.delivered[count:]
        assert (ended == ["r"]) == self.state.finished == (result.finish_reason is not None)
        return result


def output(token_ids: list[int], **fields: Any) -> TokenOutput:
    return TokenOutput(rid="r", token_ids=token_ids, **fields)


def logprobs_of(token_ids: list[int]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id=token_id, logprob=-float(index))
        for index, token_id in enumerate(token_ids)
    ]


def test_a_stop_string_in_the_middle_of_a_step_drops_the_tokens_behind_it() -> None:
    sequence = Sequence(stop=["END"])
    before, stop, behind = (TOKENIZER.encode(text) for text in ("so ", "END", " and more"))
    ids = before + stop + behind
    result = sequence.push(output(ids, logprobs=logprobs_of(ids)))
    assert (result.text, result.token_ids) == ("so ", before + stop)
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, "END")
    assert result.logprobs == logprobs_of(ids)[: len(before + stop)]
    assert result.completion_tokens == len(before + stop)
    assert sequence.state.finished and sequence.state.output_ids == before + stop


def test_a_stop_string_counts_though_the_step_also_reached_the_limit() -> None:
    result = Sequence(stop=["END"]).push(
        output(TOKENIZER.encode("so END"), finish_reason=FinishReason.LENGTH)
    )
    assert (result.text, result.finish_reason, result.matched_stop) == (
        "so ",
        FinishReason.STOP,
        "END",
    )


def test_a_stop_string_before_the_stop_token_of_the_same_step_counts() -> None:
    ids = [*TOKENIZER.encode("END!"), IM_END]
    result = Sequence(stop=["END"]).push(
        output(ids, finish_reason=FinishReason.STOP, stop_token_id=IM_END)
    )
    assert (result.text, result.matched_stop, result.token_ids) == (
        "",
        "END",
        TOKENIZER.encode("END"),
    )


def test_a_stop_string_is_shown_on_demand() -> None:
    assert (
        Sequence(stop=["END"], include_stop=True).push(output(TOKENIZER.encode("so END!"))).text
        == "so END"
    )


def test_a_stop_token_counts_but_is_not_text() -> None:
    ids = [*TOKENIZER.encode("so"), IM_END]
    result = Sequence(skip_special_tokens=False).push(
        output(ids, finish_reason=FinishReason.STOP, stop_token_id=IM_END)
    )
    assert (result.text, result.token_ids, result.matched_stop, result.completion_tokens) == (
        "so",
        ids,
        IM_END,
        len(ids),
    )


def test_a_special_token_that_does_not_stop_is_text_where_asked_for() -> None:
    ids = [*TOKENIZER.encode("so"), IM_END]
    assert Sequence(skip_special_tokens=False).push(output(ids)).text == "so<|im_end|>"
    assert Sequence(skip_special_tokens=True).push(output(ids)).text == "so"


def test_the_last_output_brings_what_was_held_back() -> None:
    sequence = Sequence(stop=["END"])
    assert sequence.push(output(TOKENIZER.encode("an EN"))).text == "an "
    last = sequence.push(output([], finish_reason=FinishReason.ABORT, error="gone"))
    assert (last.text, last.finish_reason, last.error, last.matched_stop) == (
        "EN",
        FinishReason.ABORT,
        "gone",
        None,
    )


def test_an_unfinished_output_has_no_reason() -> None:
    sequence = Sequence()
    result = sequence.push(output(TOKENIZER.encode("so")))
    assert (result.finish_reason, result.matched_stop, sequence.state.finished) == (
        None,
        None,
        False,
    )


def steps_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(
    data=st.data(),
    stop=st.sampled_from([[], ["END"], ["\n\nQ:", "東"], ["never"]]),
    lives=st.integers(1, 4),
)
def test_after_a_restart_nothing_is_repeated_and_nothing_is_missing(
    data: st.DataObject, stop: list[str], lives: int
) -> None:
    ids = TOKENIZER.encode(STORY)
    undisturbed = Sequence(stop=stop).push(output(ids, finish_reason=FinishReason.LENGTH))
    sequence, results = Sequence(stop=stop), list[RequestOutput]()
    for life in range(1, lives + 1):
        message = sequence.state.to_message()
        assert (message.rid, message.input_ids, message.priority, message.arrival_time) == (
            "r",
            PROMPT,
            3,
            7.5,
        )
        assert message.output_ids == ids[: len(message.output_ids)] == sequence.state.output_ids
        steps = steps_of(data, ids[len(message.output_ids) :])
        done = len(steps) if life == lives else data.draw(st.integers(0, len(steps) - 1))
        for index, step in enumerate(steps[:done], 1):
            reason = FinishReason.LENGTH if index == len(steps) else None
            if not sequence.state.finished:
                results.append(sequence.push(output(step, finish_reason=reason)))
    whole = merge(results)
    assert (whole.text, whole.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert (whole.finish_reason, whole.matched_stop) == (
        undisturbed.finish_reason,
        undisturbed.matched_stop,
    )
    assert whole.completion_tokens == len(whole.token_ids)


def test_the_message_does_not_change_with_the_sequence() -> None:
    sequence = Sequence()
    message = sequence.state.to_message()
    sequence.push(output(TOKENIZER.encode("so")))
    assert message.output_ids == []


def test_what_comes_once_is_not_repeated_after_a_restart() -> None:
    sequence = Sequence()
    first = sequence.push(output([5], cached_tokens=4, prompt_logprobs=[None]))
    again = sequence.push(output([6], cached_tokens=9, prompt_logprobs=[None]))
    assert (first.cached_tokens, first.prompt_logprobs) == (4, [None])
    assert (again.cached_tokens, again.prompt_logprobs) == (4, None)


def test_merged_outputs_are_one() -> None:
    sequence = Sequence()
    ids = TOKENIZER.encode("one two")
    results = [
        sequence.push(
            output(
                [token_id],
                logprobs=logprobs_of([token_id]),
                prompt_logprobs=[None] if index == 0 else None,
            )
        )
        for index, token_id in enumerate(ids)
    ]
    whole = merge(results)
    assert (whole.text, whole.token_ids, whole.prompt_logprobs) == ("one two", ids, [None])
    assert whole.logprobs == [entry for token_id in ids for entry in logprobs_of([token_id])]
    assert (whole.prompt_tokens, whole.completion_tokens) == (len(PROMPT), len(ids))


def test_what_goes_wrong_for_one_request_ends_it_and_no_other() -> None:
    faulty, healthy = Sequence(), Sequence()

    def fail(token_ids: list[int]) -> Any:
        raise IndexError("no such token")

    faulty.state.detokenizer.push = fail  # type: ignore[method-assign,assignment]
    states = {"faulty": faulty.state, "r": healthy.state}
    ids = TOKENIZER.encode("so")
    both = [TokenOutput(rid="faulty", token_ids=ids), output(ids)]
    assert process_outputs(states, both) == (["faulty"], ["faulty"])
    assert [one.finish_reason for one in faulty.delivered] == [FinishReason.ERROR]
    assert [one.text for one in healthy.delivered] == ["so"]


def test_a_reader_that_fails_ends_its_request_and_no_other() -> None:
    faulty, healthy = Sequence(), Sequence()

    def fail(output: Any) -> None:
        raise RuntimeError("no reader")

    faulty.state.deliver = fail
    ids = TOKENIZER.encode("so")
    both = [TokenOutput(rid="faulty", token_ids=ids), output(ids)]
    states = {"faulty": faulty.state, "r": healthy.state}
    assert process_outputs(states, both) == (["faulty"], ["faulty"])
    assert [one.text for one in healthy.delivered] == ["so"]


def test_the_engine_is_told_of_ends_that_it_does_not_know() -> None:
    stopped, known = Sequence(stop=["END"]), Sequence()
    states = {"stopped": stopped.state, "r": known.state}
    outputs = [
        TokenOutput(rid="stopped", token_ids=TOKENIZER.encode("END")),
        output([5], finish_reason=FinishReason.LENGTH),
        TokenOutput(rid="nobody's", token_ids=[5]),
    ]
    assert process_outputs(states, outputs) == (["stopped", "r"], ["stopped"])
    assert process_outputs(states, outputs) == ([], [])
