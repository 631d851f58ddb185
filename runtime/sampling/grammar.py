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


INVALID_GRAMMAR = "invalid_grammar"  # Error code of requests whose grammar cannot be followed.
# Until the engine knows its size, a character may take 500 bytes of memory.
MAX_GRAMMAR_CHARS = 256 * 1024
# Stack of a thread that compiles. llguidance recurses, with about 3 KB per rule of a chain, and a
# stack overflow ends the process. The memory is reserved, and allocated when used.
_STACK_BYTES = 512 * 2**20
_stack_lock = threading.Lock()
_unchecked = threading.local()
# Maximum of characters times rules. The library reads GBNF in Python, in quadratic time.
_MAX_GBNF = 10_000_000
# CPU time that a grammar may take, once per text and per token. Most masks take microseconds, those
# of large schemas some milliseconds. Slower grammars would delay all other requests.
_SECONDS, _SECONDS_A_TOKEN = 0.5, 0.01
_SOURCE_LINES = re.compile(r"\n +\d+ \| ")


class GrammarFault(ValueError):
    """A grammar that passed its check but that the engine cannot follow."""

    code = INVALID_GRAMMAR


def from_json_schema(schema: Any, *, strict: bool = True, closed: bool = False) -> str:
    """Return a grammar of the values that a JSON schema describes.

    If `closed`, objects that name their properties have no others. Raise `ValueError` for a schema
    that no text satisfies, and, if `strict`, for a keyword that grammars cannot follow.
    """
    from llguidance import LLMatcher

    held = held_schema(schema, whose="the schema", strict=strict, closed=closed)
    return checked(LLMatcher.grammar_from_json_schema(json.dumps(held)))


def from_regex(pattern: str) -> str:
    """Return a grammar of the texts that a regular expression matches whole. Raise `ValueError`."""
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """Return a grammar of these texts. Raise `ValueError` if there is none or one is empty."""
    if not choices or not all(choices):
        raise ValueError("a choice needs one text or more, and none may be empty")
    # One terminal, because the parser does not take thousands of rules.
    return from_lark("start: TEXT\nTEXT: " + " | ".join(json.dumps(each) for each in choices))


def from_lark(grammar: str, special_ids: Collection[int] = ()) -> str:
    """Return a grammar in llguidance's form of Lark. Raise `ValueError`.

    `special_ids` are the tokens that the grammar names.
    """
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_lark(grammar), max(special_ids, default=0))


def from_ebnf(grammar: str) -> str:
    """Return a grammar from llama.cpp's GBNF or from Lark. Raise `ValueError`."""
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
        # The errors of this Python parser have no public type.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the grammar cannot be read: {reason}") from None
    return from_lark(lark)


def from_structural_tag(structures: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
    """Return SGLang's structural tag as a grammar. Raise `ValueError`.

    The text is free until a trigger appears. Then a structure that begins with the trigger must
    follow. A structure is (begin, JSON schema of the content, end).
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
    """Return a grammar in Lark that contains another grammar as its `@body`."""
    body = json.loads(grammar) if grammar.startswith("{") else {}
    parts = body.get("grammars") or [{"lark_grammar": grammar}]
    return json.dumps(
        {"grammars": [{"lark_grammar": lark}, {**parts[0], "name": "body"}, *parts[1:]]}
    )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Skip the checks of grammars that are made in this block. The caller checks them."""
    before, _unchecked.on = getattr(_unchecked, "on", False), True
    try:
        yield
    finally:
        _unchecked.on = before


def checked(grammar: str, last_id: int = 0) -> str:
    """Return the grammar after a check. `last_id` is the highest token id that it names.

    Raise `ValueError` if llguidance refuses it, no text satisfies it, or it is too large.
    """
    check_length(grammar)
    if getattr(_unchecked, "on", False):
        return grammar
    matcher = compiled(_bytes(last_id and last_id.bit_length()), grammar)
    # The first mask shows whether any text satisfies the grammar. A token shows whether it is too
    # slow.
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
    """Return a matcher, made on a stack that is deep enough for any grammar.

    Raise `GrammarFault` if the library panics. A panic is not an `Exception` and would end the
    process.
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
    """Return a vocabulary of the 256 bytes, and of special tokens up to id 2 ** bits."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not bits:
        return LLTokenizer("byte")
    tokens = Bytes(max(512, 2**bits + 1))
    return LLTokenizer(TokenizerWrapper(tokens), len(tokens.tokens), [tokens.eos_token_id])


def reason_of(matcher: LLMatcher) -> str:
    told = matcher.get_error().replace("<non-verbose/>", "")
    # Errors of schemas end with lines of the internal grammar. Cut them off.
    schema, _, reason = told.partition("failed to compile JSON schema: ")
    told = _SOURCE_LINES.split(reason)[0] if reason else schema
    reason = " ".join(told.split())[:500]
    return "no text satisfies it" if reason.startswith("NoExtension") else reason


def check_length(text: str) -> None:
    """Raise `ValueError` for a text that is too long for a grammar."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"the grammar has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}; send a "
            "smaller one"
        )


def _limits() -> LLParserLimits:
    """Return the limits of the work for one token, because other requests wait for it.

    The limits allow some milliseconds, or a fifth of a second if a text can be read in thousands of
    ways.
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
    """The position of one output in its grammar."""

    def __init__(self, matcher: LLMatcher, spent: Callable[[float], None] | None = None) -> None:
        """`spent` is called with the CPU time of each call, in seconds."""
        self._matcher, self._spent = matcher, spent
        # Number of accepted tokens, and the CPU time of the tokens and their masks.
        self._tokens, self._seconds = 0, 0.0
        self._seconds_ahead = 0.0  # CPU time after tokens that were only proposed.

    @property
    def fault(self) -> str | None:
        """The reason why the matcher cannot continue, or None."""
        if self._matcher.is_error():
            return reason_of(self._matcher)
        if self._seconds > self._allowed_seconds:
            return (
                f"it has taken {self._seconds:.1f} s of the processor's time for {self._tokens} "
                "tokens, for it reads one text in too many ways"
            )
        return None

    @property
    def _allowed_seconds(self) -> float:
        return _SECONDS + _SECONDS_A_TOKEN * self._tokens

    @property
    def is_finished(self) -> bool:
        """Whether no token can follow."""
        stopped: bool = self._matcher.is_stopped() and not self._matcher.is_error()
        return stopped

    def accept(self, tokens: Sequence[int]) -> None:
        """Accept these tokens. A token that may not follow is a fault."""
        began = time.thread_time()
        self._matcher.consume_tokens(list(tokens))
        self._took(time.thread_time() - began)
        self._tokens += len(tokens)

    def takes(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> bool:
        """Return whether these tokens may follow, after those of `ahead`."""
        began = time.thread_time()
        both = [*ahead, *tokens]
        taken: int = self._matcher.validate_tokens(both)
        self._took(time.thread_time() - began, is_ahead=bool(ahead))
        return taken == len(both)

    def takes_only(self, tokens: Collection[int]) -> bool:
        """Return whether no other tokens may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) <= set(tokens)

    def forced(self) -> list[int]:
        """Return the tokens that must follow. Empty if there is a choice."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow without ending the output.

        Return 0 if positions ahead have taken as much time as an output may take.
        """
        if self._seconds_ahead > self._allowed_seconds:
            return 0
        began = time.thread_time()
        count: int = self._matcher.validate_tokens(list(tokens))
        after = self._after(tokens[:count])
        # Only the last of the tokens can end the output, because none may follow the end.
        count -= bool(count) and after.is_stopped()
        self._took(time.thread_time() - began, is_ahead=True)
        return 0 if after.is_error() else count

    def fill(self, bits: npt.NDArray[np.int32], ahead: Sequence[int] = ()) -> None:
        """Set the bit of each token that may follow, in bits [ceil(V / 32)], lowest bit first.

        `ahead` are tokens that precede it. The position does not change.
        """
        began = time.thread_time()
        matcher = self._after(ahead) if ahead else self._matcher
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._took(time.thread_time() - began, is_ahead=bool(ahead))

    def _after(self, tokens: Sequence[int]) -> LLMatcher:
        """Return a copy of the matcher after `tokens`. A fault of the copy is none of the output's,
        because the tokens may be rejected.
        """
        copy: LLMatcher = self._matcher.deep_copy()
        copy.consume_tokens(list(tokens))
        return copy

    def _took(self, seconds: float, *, is_ahead: bool = False) -> None:
        if is_ahead:
            self._seconds_ahead += seconds
        else:
            self._seconds += seconds
        if self._spent is not None:
            self._spent(seconds)
