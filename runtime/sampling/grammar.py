"""Grammars that outputs must follow: JSON schemas, regular expressions, Lark and GBNF, by
llguidance (https://github.com/guidance-ai/llguidance).

    grammar = from_json_schema(schema)        # text, checked, in SamplingParams.grammar
    matcher = grammars.matcher(grammar)       # in the engine, one a request
    matcher.fill(bits)                        # the tokens that may follow
    matcher.accept(tokens)                    # those that do

A grammar is the text that llguidance reads. It is checked without a vocabulary where a request
comes in, and compiled with the model's where tokens are chosen.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .grammar_vocabulary import Bytes
from .json_schema import held_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


INVALID_GRAMMAR = "invalid_grammar"
"""Error code of requests whose grammar cannot be followed."""
MAX_GRAMMAR_CHARS = 256 * 1024
"""Each may take 500 bytes of memory until the engine knows how many."""
_STACK_BYTES = 512 * 2**20
"""Of a thread that compiles: llguidance goes a level deeper, of some 3 KB, with each rule of a
chain, and ends the process where the stack does. Reserved, and taken as far as it is used.
"""
_stack_lock = threading.Lock()
_unchecked = threading.local()
_MAX_GBNF = 10_000_000
"""Characters times rules: the library reads GBNF rule by rule, in Python, as often as it has rules.
"""
_SECONDS, _SECONDS_A_TOKEN = 0.5, 0.01
"""Of the processor that a grammar may take: once a text, and for each token. Large schemas take
some milliseconds now and then, others microseconds; what takes more keeps all others waiting.
"""
_SOURCE_LINES = re.compile(r"\n +\d+ \| ")


class GrammarFault(ValueError):
    """A grammar that passed its check, and that the engine cannot follow."""


def from_json_schema(schema: Any, *, strict: bool = True, closed: bool = False) -> str:
    """A grammar of the values that a JSON schema describes. Raises `ValueError` for a schema that
    no text satisfies, and if it is `strict` for a keyword that texts cannot be held to. `closed`:
    objects that name their properties have no others.
    """
    from llguidance import LLMatcher

    held = held_schema(schema, whose="the schema", strict=strict, closed=closed)
    return checked(LLMatcher.grammar_from_json_schema(json.dumps(held)))


def from_regex(pattern: str) -> str:
    """A grammar of the texts that a regular expression matches whole. Raises `ValueError`."""
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """A grammar of these texts. Raises `ValueError` where there is none."""
    if not choices or not all(choices):
        raise ValueError("a choice is of one text or more, none of them empty")
    # A terminal: thousands of rules would be too many for the parser.
    return from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(each) for each in choices))


def from_lark(grammar: str, special_ids: Collection[int] = ()) -> str:
    """A grammar in llguidance's form of Lark. `special_ids`: of tokens that it names. Raises
    `ValueError`.
    """
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_lark(grammar), max(special_ids, default=0))


def from_ebnf(grammar: str) -> str:
    """A grammar in GBNF, as llama.cpp's, or in Lark. Raises `ValueError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    check_length(grammar)
    rules = grammar.count("::=")
    if len(grammar) * rules > _MAX_GBNF:
        raise ValueError(
            f"GBNF of {rules} rules and {len(grammar)} characters takes too long to read; send it "
            "as Lark"
        )
    try:
        lark = any_to_lark(grammar)
    except Exception as error:
        # A parser in Python, whose errors have no type of their own that is public.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the grammar cannot be read: {reason}") from None
    return from_lark(lark)


def from_structural_tag(structures: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
    """A grammar of free text in which, where a trigger appears, one of the structures that begin
    with it must follow: (begin, JSON schema of what comes then, end), as SGLang's. Raises
    `ValueError`.
    """
    from llguidance import StructTag

    tags = []
    for begin, schema, end in structures:
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"no trigger is the beginning of the structure {begin!r:.80}")
        content = held_schema(
            schema if isinstance(schema, dict) else {}, whose=f"the structure {begin!r:.80}"
        )
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=content, end=end))
    if not tags:
        raise ValueError("there are no structures")
    return from_lark(StructTag.to_grammar(tags, assume_special=False))


def after(lark: str, grammar: str) -> str:
    """A grammar in Lark that goes on with another one, its `@body`."""
    body = json.loads(grammar) if grammar.startswith("{") else {}
    parts = body.get("grammars") or [{"lark_grammar": grammar}]
    return json.dumps(
        {"grammars": [{"lark_grammar": lark}, {**parts[0], "name": "body"}, *parts[1:]]}
    )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within this, grammars are made and not checked: the caller checks them otherwise."""
    before, _unchecked.on = getattr(_unchecked, "on", False), True
    try:
        yield
    finally:
        _unchecked.on = before


def checked(grammar: str, last_id: int = 0) -> str:
    """The same. `last_id`: the highest token that it names. Raises `ValueError` for one that
    llguidance does not take, that no text satisfies, or whose size is out of bounds.
    """
    check_length(grammar)
    if getattr(_unchecked, "on", False):
        return grammar
    matcher = compiled(_bytes(last_id and last_id.bit_length()), grammar)
    # The first mask finds out what no text satisfies, a token what is too much for one.
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    first = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:256])
    if len(first) and not matcher.is_error():
        matcher.consume_token(int(first[-1]))
        matcher.compute_ff_tokens()
        if not (matcher.is_stopped() or matcher.is_error()):
            matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason_of(matcher))
    return grammar


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher, made on a stack that is deep enough for any grammar. Raises `GrammarFault` where
    the library panics, which is no `Exception` and would end the process.
    """
    from llguidance import LLMatcher

    made: Future[LLMatcher] = Future()

    def make() -> None:
        try:
            made.set_result(LLMatcher(tokenizer, grammar, log_level=0, limits=_limits()))
        except Exception as error:
            made.set_exception(error)
        except BaseException as panic:
            fault = GrammarFault(f"the library that reads grammars fails on it: {panic!s:.300}")
            made.set_exception(fault)

    thread = threading.Thread(target=make, name="grammar-compiler", daemon=True)
    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return made.result()


@cache
def _bytes(bits: int = 0) -> LLTokenizer:
    """A vocabulary of the 256 bytes, and of special tokens to id 2 ** bits."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not bits:
        return LLTokenizer("byte")
    tokens = Bytes(max(512, 2**bits + 1))
    return LLTokenizer(TokenizerWrapper(tokens), len(tokens.tokens), [tokens.eos_token_id])


def reason_of(matcher: LLMatcher) -> str:
    told = matcher.get_error().replace("<non-verbose/>", "")
    # A schema's error goes on with lines of the grammar around it, which clients never wrote.
    schema, _, reason = told.partition("failed to compile JSON schema: ")
    told = _SOURCE_LINES.split(reason)[0] if reason else schema
    reason = " ".join(told.split())[:500]
    return "no text satisfies it" if reason.startswith("NoExtension") else reason


def check_length(text: str) -> None:
    """Raises `ValueError` for a text that is too long for a grammar."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"the grammar has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}; send a "
            "smaller one"
        )


def _limits() -> LLParserLimits:
    """What one token may cost at most, for other requests wait for it: some milliseconds, and a
    fifth of a second where a grammar reads one text in thousands of ways.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: LLMatcher, spent: Callable[[float], None] | None = None) -> None:
        """`spent` is told of each time that the processor took for it, in seconds."""
        self._matcher, self._spent = matcher, spent
        self._tokens, self._seconds = 0, 0.0
        """Behind which it stands, and the processor's time that they and their masks took."""

    @property
    def fault(self) -> str | None:
        """Why it cannot go on, where it cannot."""
        if self._matcher.is_error():
            return reason_of(self._matcher)
        if self._seconds > _SECONDS + _SECONDS_A_TOKEN * self._tokens:
            return (
                f"it has taken {self._seconds:.1f} s of the processor's time for {self._tokens} "
                "tokens, for it reads one text in too many ways"
            )
        return None

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        stopped: bool = self._matcher.is_stopped() and not self._matcher.is_error()
        return stopped

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on behind these tokens; one that cannot follow is a fault."""
        began = time.thread_time()
        self._matcher.consume_tokens(list(tokens))
        self._took(time.thread_time() - began)
        self._tokens += len(tokens)

    def takes(self, tokens: Sequence[int]) -> bool:
        """Whether these may follow."""
        began = time.thread_time()
        taken: int = self._matcher.validate_tokens(list(tokens))
        self._took(time.thread_time() - began)
        return taken == len(tokens)

    def takes_only(self, tokens: Collection[int]) -> bool:
        """Whether none but these may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) <= set(tokens)

    def forced(self) -> list[int]:
        """The tokens that must follow, whatever the model says; none where there is a choice."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Set the bit of each token that may follow, in bits [ceil(V / 32)], the lowest first."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._took(time.thread_time() - began)

    def _took(self, seconds: float) -> None:
        self._seconds += seconds
        if self._spent is not None:
            self._spent(seconds)
