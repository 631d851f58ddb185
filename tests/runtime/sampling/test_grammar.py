"""Outputs follow their grammars: in a crowd, out of pages, after a restart, and to their ends."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tiny_models import VOCAB, make_tiny_model

from piecework import LLM, SamplingParams
from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.engine.compiling import CompilingRequests
from piecework.runtime.llm import Completion
from piecework.runtime.process.memory import allocated_memory
from piecework.runtime.sampling import grammar as grammars
from piecework.runtime.sampling import grammar_cache
from piecework.runtime.sampling.grammar import GrammarFault
from piecework.runtime.sampling.grammar_cache import Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = make_tiny_model(tmp_path_factory.mktemp("grammar") / "model")
    return LLM(str(model), dtype="float32", max_total_tokens=2048, num_threads=1)


def params(grammar: str, count: int = 200, **kwargs: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, grammar=grammar, **{"seed": 3, **kwargs})


def generate(llm: LLM, *args: Any) -> list[Completion]:
    found = llm.generate(*args)
    llm.core.check()
    return found


@settings(deadline=None, max_examples=examples(6, exploring=12))
@given(seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6), hot=st.booleans())
def test_answers_follow_a_schema_beside_others_without(
    llm: LLM, seeds: list[int], hot: bool
) -> None:
    schema = grammars.from_json_schema(PERSON)
    temperature = 3.0 if hot else 1.0
    each = [params(schema, seed=seed, temperature=temperature) for seed in seeds]
    free = SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True)
    *found, other = generate(llm, ["A person:"] * (len(seeds) + 1), [*each, free])
    for completion in found:
        if completion.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(completion.text), PERSON)
        else:
            assert len(completion.token_ids) == 200
    assert any(completion.finish_reason is FinishReason.STOP for completion in found)
    assert other.token_ids == generate(llm, "A person:", free)[0].token_ids


def test_each_kind_of_grammar(llm: LLM) -> None:
    for grammar, pattern in (
        (grammars.from_regex(r"[0-9]{3}-[a-f]{2}"), r"[0-9]{3}-[a-f]{2}"),
        (grammars.from_choice(["yes", "no", "maybe"]), "yes|no|maybe"),
        (grammars.from_lark('start: "a" NUMBER\nNUMBER: /[0-9]{2}/'), "a[0-9]{2}"),
        (grammars.from_ebnf('root ::= "x" [yz] "!"'), "x[yz]!"),
    ):
        (completion,) = generate(llm, "Say:", params(grammar))
        assert completion.finish_reason is FinishReason.STOP
        assert re.fullmatch(pattern, completion.text)


def test_what_is_forced_takes_no_steps(llm: LLM) -> None:
    grammar = grammars.from_regex("Natalia sold clips to 48 of her friends[.!]")
    before = llm.core.stats().steps_total
    (jumped,) = generate(llm, "Say:", params(grammar))
    steps = llm.core.stats().steps_total - before
    assert jumped.text.startswith("Natalia sold clips to 48 of her friends")
    assert steps <= 4 < len(jumped.token_ids)
    (told,) = generate(llm, "Say:", params(grammar, logprobs=1))
    assert told.text == jumped.text and len(told.logprobs) == len(told.token_ids)


def test_length_ends_a_text_within_its_grammar(llm: LLM) -> None:
    grammar = grammars.from_regex("[a-z]{400}")
    (completion,) = generate(llm, "Say:", params(grammar, 9))
    assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 9
    assert re.fullmatch("[a-z]+", completion.text)


def test_forced_tokens_keep_within_the_length(llm: LLM) -> None:
    grammar = grammars.from_choice(["Natalia sold clips to 48 of her friends"])
    (completion,) = generate(llm, "Say:", params(grammar, 3))
    assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 3


@pytest.mark.parametrize("told", [1, 3, 7])
def test_a_resumed_request_goes_on_where_it_was(llm: LLM, told: int) -> None:
    grammar = grammars.from_json_schema(PERSON)
    asked = params(grammar, temperature=0.7, logprobs=0)
    ids = llm.tokenizer.encode("A person:")
    (whole,) = generate(llm, [ids], asked)
    llm.core.add(
        GenerateRequest(rid="again", input_ids=ids, params=asked, output_ids=whole.token_ids[:told])
    )
    rest: list[int] = []
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            rest += output.token_ids
    llm.core.check()
    assert whole.token_ids[:told] + rest == whole.token_ids


def test_requests_that_give_way_keep_their_place(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    crowded = LLM(str(model), dtype="float32", max_total_tokens=120, page_size=4, num_threads=1)
    grammar = grammars.from_json_schema(
        {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 9}
    )
    found = generate(
        crowded, ["A list:"] * 6, [params(grammar, 90, seed=seed) for seed in range(6)]
    )
    assert crowded.core.stats().preemptions_total > 0
    for completion in found:
        if completion.finish_reason is FinishReason.STOP:
            assert set(json.loads(completion.text)) <= {"ab", "cd"}
        else:
            assert completion.text.lstrip().startswith("[")


def test_an_early_end_is_banned_as_far_as_the_grammar_goes_on(llm: LLM) -> None:
    grammar = grammars.from_regex("[a-z]*")
    (completion,) = generate(llm, "Say:", params(grammar, 40, min_new_tokens=10))
    assert len(completion.token_ids) >= 10


def test_a_grammar_that_the_engine_cannot_compile_ends_its_request_alone(llm: LLM) -> None:
    broken, other = generate(
        llm, ["a", "b"], [params("no grammar"), SamplingParams(max_new_tokens=3, seed=1)]
    )
    assert broken.finish_reason is FinishReason.ERROR and "grammar" in (broken.error or "")
    assert len(other.token_ids) == 3


@pytest.mark.parametrize(("pattern", "min_new_tokens"), [("", 2), ("[ab]{3}", 2), ("[ab]{3}", 0)])
def test_what_ends_too_early_by_its_grammar_is_told_so(
    llm: LLM, pattern: str, min_new_tokens: int
) -> None:
    """It is who asked, not the model, whose numbers leave no token."""
    ends = [token for token in range(VOCAB) if llm.tokenizer.token_bytes(token)[:1] in (b"a", b"b")]
    wanted = {"min_new_tokens": min_new_tokens, "stop_token_ids": ends}
    (done,) = generate(llm, ["Say"], params(grammars.from_regex(pattern), **wanted))
    if min_new_tokens:
        assert done.finish_reason is FinishReason.ERROR
        assert "its grammar cannot go on: before min_new_tokens" in (done.error or "")
    else:
        assert done.finish_reason is FinishReason.STOP


def test_a_token_that_cannot_follow_is_an_error(llm: LLM) -> None:
    """What an engine is given to resume with may be another model's."""
    message = GenerateRequest(
        rid="wrong",
        input_ids=[5, 6],
        params=params(grammars.from_regex("[0-9]{9}")),
        output_ids=llm.tokenizer.encode("abc"),
    )
    llm.core.add(message)
    (output,) = [output for _ in range(3) for output in llm.core.step().outputs]
    llm.core.check()
    assert output.finish_reason is FinishReason.ERROR and "grammar" in (output.error or "")


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (grammars.from_json_schema, {"type": "nope"}),
        (grammars.from_json_schema, {"$ref": "#"}),
        (grammars.from_json_schema, {"$ref": "http://localhost/schema"}),
        (grammars.from_json_schema, {"allOf": [{"type": "string"}, {"type": "integer"}]}),
        (grammars.from_json_schema, ["no schema"]),
        (grammars.from_regex, "("),
        (grammars.from_regex, "(?=a)b"),
        (grammars.from_choice, []),
        (grammars.from_lark, 'begin: "a"'),
        (grammars.from_ebnf, 'root ::= "a'),
        (grammars.from_lark, "start: " + '"a" ' * 200_000),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, given: Any) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        make(given)


def test_a_choice_of_thousands(llm: LLM) -> None:
    choices = [f"choice {number * 7919 % 100_003}" for number in range(5000)]
    (completion,) = generate(llm, "Say:", params(grammars.from_choice(choices)))
    assert completion.text in choices


def test_what_is_too_much_for_one_token_is_refused_where_it_comes_in() -> None:
    members = {f"k{number}": {"type": "string"} for number in range(2000)}
    with pytest.raises(ValueError, match="items"):
        grammars.from_json_schema({"type": "object", "properties": members})


def test_gbnf_that_would_be_read_for_minutes_is_refused() -> None:
    rules = "\n".join([f'r{number} ::= "a" r{number + 1}' for number in range(800)])
    with pytest.raises(ValueError, match="as Lark"):
        grammars.from_ebnf(f'root ::= r0\n{rules}\nr800 ::= "x"')


def test_grammars_are_compiled_once_and_the_oldest_forgotten(llm: LLM) -> None:
    loads = 0

    def load() -> Any:
        nonlocal loads
        loads += 1
        return llm.tokenizer

    kept = Grammars(load, 512, frozenset({2}))
    first = grammars.from_regex("a")
    kept.matcher(first).accept([llm.tokenizer.encode("a")[0]])
    assert kept.is_compiled(first) and not kept.matcher(first).is_finished
    for number in range(70):
        kept.matcher(grammars.from_choice([f"x{number}"]))
    assert not kept.is_compiled(first) and loads == 1


def test_bits_name_the_tokens_that_may_follow(llm: LLM) -> None:
    kept = Grammars(lambda: llm.tokenizer, 512, frozenset({2}))
    bits = np.zeros(16, np.int32)
    kept.matcher(grammars.from_regex("[ab]")).fill(bits)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    assert allowed == sorted(llm.tokenizer.encode(letter)[0] for letter in "ab")


@pytest.mark.parametrize("most", [3, 12, 40])
def test_tokens_that_are_allowed_together_are_those_that_may_follow(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    grammar = grammars.from_json_schema({"type": "string", "maxLength": most})
    ours = Grammars(lambda: llm.tokenizer, 512, frozenset({2})).matcher(grammar)
    monkeypatch.setattr(grammar_cache, "_SLICES", [])
    each = Grammars(lambda: llm.tokenizer, 512, frozenset({2})).matcher(grammar)
    bits = np.zeros((2, 16), np.int32)
    for token in llm.tokenizer.encode('"The quick brown fox jumps over the lazy'):
        ours.fill(bits[0]), each.fill(bits[1])
        assert (bits[0] == bits[1]).all()
        if each.fault or not ours.takes([token]):
            break
        ours.accept([token]), each.accept([token])


def test_a_mask_that_takes_too_long_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spent(grammars.Matcher):
        fault = "too much fuel"  # type: ignore[assignment]

    grammar = grammars.from_regex("[ab]{9}")
    kept = llm.core.grammars
    assert kept is not None
    matcher = kept.matcher(grammar)
    monkeypatch.setattr(kept, "matcher", lambda text: Spent(matcher._matcher))
    free = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
    spent, other = generate(llm, ["a", "b"], [params(grammar), free])
    assert spent.finish_reason is FinishReason.ERROR
    assert "too much fuel" in (spent.error or "")
    assert len(other.token_ids) == 5


def test_a_grammar_that_keeps_the_processor_busy_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_SECONDS", 0.02)
    monkeypatch.setattr(grammars, "_SECONDS_A_TOKEN", 0.0)
    ambiguous = grammars.from_lark('start: s\ns: s s | s s s | "a"')
    free = SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True)
    busy, other = generate(llm, ["a", "b"], [params(ambiguous, min_new_tokens=200), free])
    assert busy.finish_reason is FinishReason.ERROR
    assert "too many ways" in (busy.error or "") and len(busy.token_ids) < 200
    assert len(other.token_ids) == 9


def test_a_lexer_that_is_full_fails_no_later_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_limits", lambda: LLParserLimits(max_lexer_states=60))
    grammar = grammars.from_regex("[ab]{300}")
    kept = llm.core.grammars
    assert kept is not None
    kept.matcher(grammar)
    (full,) = generate(llm, "a", params(grammar, 300))
    assert full.finish_reason is FinishReason.ERROR and "lexer" in (full.error or "")
    bits = np.zeros(16, np.int32)
    again = kept.matcher(grammar)
    again.fill(bits)
    assert again.fault is None and bits.any()


def test_no_chain_of_rules_is_too_long_for_the_stack(llm: LLM) -> None:
    count = 7_000
    rules = "\n".join([f"a{number}: a{number + 1}" for number in range(count)])
    refs = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**refs, f"a{count}": {"type": "null"}}}
    for grammar in (
        grammars.from_lark(f'start: a0\n{rules}\na{count}: "x"'),
        grammars.from_json_schema(schema),
    ):
        (completion,) = generate(llm, "Say:", params(grammar))
        assert completion.text.strip() in ("x", "null")


def test_who_knows_its_grammar_waits_for_none_that_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, begun, end = Grammars(lambda: llm.tokenizer, 512, frozenset({2})), Event(), Event()
    known, large = grammars.from_regex("a"), grammars.from_regex("b")
    kept.matcher(known)
    compiled = grammar_cache.compiled

    def slowly(*args: Any) -> Any:
        begun.set()
        assert end.wait(60)
        return compiled(*args)

    monkeypatch.setattr(grammar_cache, "compiled", slowly)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(kept.matcher, large)
        assert begun.wait(60)
        try:
            threads.submit(kept.matcher, known).result(timeout=30)
            assert not waits.done()
        finally:
            end.set()


def test_a_fault_is_found_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Grammars(lambda: llm.tokenizer, 512, frozenset({2}))
    with pytest.raises(ValueError, match="grammar"):
        kept.matcher("no grammar")
    monkeypatch.setattr(grammar_cache, "compiled", None)
    assert kept.is_compiled("no grammar")
    with pytest.raises(ValueError, match="grammar"):
        kept.matcher("no grammar")


def literal(letter: str, count: int) -> str:
    """A grammar of one long text, which takes some hundred bytes of memory for each letter."""
    return grammars.from_lark(f'start: "{letter * count}"')


def kept_grammars(llm: LLM) -> Grammars:
    kept = Grammars(lambda: llm.tokenizer, 512, frozenset({2}))
    kept.matcher(grammars.from_regex("a"))
    kept.forget(grammars.from_regex("a"))
    return kept


@pytest.mark.skipif(allocated_memory() is None, reason="the C library does not tell")
def test_a_grammar_is_charged_what_it_takes(llm: LLM) -> None:
    kept = kept_grammars(llm)
    short = "// " + "c" * 40_000 + '\nstart: "a"'
    kept.matcher(short)
    small = kept.num_bytes
    before = allocated_memory()
    kept.matcher(literal("b", 40_000))
    taken = (allocated_memory() or 0) - (before or 0)
    assert kept.num_bytes - small == pytest.approx(taken, rel=0.3)
    assert kept.num_bytes - small > 10 * small


def test_what_grammars_take_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_grammars(llm)
    kept.matcher(literal("x", 10_000))
    one = kept.num_bytes
    monkeypatch.setattr(grammar_cache, "MOST_BYTES", int(3.5 * one))
    for letter in "abcdef":
        kept.matcher(literal(letter, 10_000))
        assert kept.num_bytes <= 3.5 * one
    assert kept.is_compiled(literal("f", 10_000)) and not kept.is_compiled(literal("a", 10_000))
    monkeypatch.setattr(grammar_cache, "_MOST_OF_ONE", one // 2)
    with pytest.raises(GrammarFault, match="MB of memory, more than"):
        kept.matcher(literal("g", 10_000))


def test_a_grammar_waits_for_those_that_requests_use(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_grammars(llm)
    waiting = CompilingRequests(kept)
    monkeypatch.setattr(grammar_cache, "MOST_BYTES", 1)
    each = [
        GenerateRequest(rid=letter, input_ids=[5], params=params(literal(letter, 100)))
        for letter in "abc"
    ]
    assert all(waiting.takes(message) for message in each)
    began = time.monotonic()
    for expected in "abc":
        ready: list[GenerateRequest] = []
        while not ready and time.monotonic() - began < 60:
            for message in waiting.ready():
                ready.append(message)
                in_use = kept.matcher(message.params.grammar or "")
        assert [message.rid for message in ready] == [expected]
        for _ in range(20):
            assert list(waiting.ready()) == [], "one is let in while another is used"
            time.sleep(0.005)
        del in_use
    assert not waiting.pending
    waiting.close()


def test_a_request_whose_grammar_is_dropped_while_it_waits_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "_KEPT", 1)
    waiting = CompilingRequests(Grammars(lambda: llm.tokenizer, 512, frozenset({2})))
    ready: list[str] = []
    for number, letter in enumerate("abab"):
        asked = params(grammars.from_regex(letter))
        # One whose grammar is compiled by now does not wait.
        if not waiting.takes(GenerateRequest(rid=str(number), input_ids=[5], params=asked)):
            ready.append(str(number))
    began = time.monotonic()
    while waiting.pending and time.monotonic() - began < 60:
        ready += [message.rid for message in waiting.ready()]
    assert sorted(ready) == ["0", "1", "2", "3"]
    waiting.close()
