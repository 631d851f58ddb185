"""The grammars of an engine, each compiled once, bounded by the memory that they take.

    grammars.matcher(grammar)     # at the beginning of a text; compiles what is not kept

llguidance does not tell the size of what it compiles, and characters do not either: a text of
300,000 letters takes 150 MB, as many characters of short texts 1 MB. So the allocator is asked
before and after.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ..process.memory import allocated_memory
from .grammar import GrammarFault, Matcher, compiled, reason_of
from .grammar_vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ..tokenizer.tokenizer import Tokenizer

MOST_BYTES = 64 * 2**20
"""All grammars of an engine, those that requests use among them. Above it, grammars that no request
uses are dropped, and new ones wait.
"""
_MOST_OF_ONE = 32 * 2**20
_KEPT = 64
"""Grammars that are kept for requests to come."""
_BYTES_A_SECOND = 64 * 2**20
"""What the masks of a text add to its grammar, by the processor's time that they take: 8 to 40 MB
in a second were measured.
"""
_BYTES_A_CHARACTER = 600
"""Of a grammar, where the system does not tell what is allocated."""
_IN_A_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_A_STRING}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 13, 17, 30)),
    f"{_IN_A_STRING}+",
]
"""Tokens that llguidance allows together, without a look at each, where a string may go on with all
of them: its own slices and more lengths, for a string whose length is bounded comes to its end.
"""


class _Compiled:
    """A grammar, or the `fault` of one that cannot be compiled. `num_bytes`: of memory."""

    def __init__(self, matcher: LLMatcher | None, fault: str | None, num_bytes: int) -> None:
        self.matcher, self.fault, self._at_first = matcher, fault, num_bytes
        self._seconds = 0.0
        self._users: weakref.WeakSet[Matcher] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        return self._at_first + int(self._seconds * _BYTES_A_SECOND)

    @property
    def is_used(self) -> bool:
        return bool(self._users)

    def at_the_beginning(self) -> Matcher:
        """A matcher of its own for one text. Raises `GrammarFault`."""
        if self.matcher is None:
            raise GrammarFault(self.fault)
        matcher = Matcher(self.matcher.deep_copy(), self._spent)
        self._users.add(matcher)
        return matcher

    def _spent(self, seconds: float) -> None:
        self._seconds += seconds


class Grammars:
    """The grammars of an engine. May be used from several threads.

    `load`: gives the tokenizer, when the first grammar comes. `vocab_size` V of the model;
    `eos_token_ids`: the model's own ends of a text, beside the tokenizer's.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._load, self._vocab_size, self._eos = load, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._alive: weakref.WeakSet[_Compiled] = weakref.WeakSet()
        """What is kept, and what was forgotten while requests use it."""
        self._lock, self._turn = Lock(), Lock()
        """Of what is compiled, held for a moment; of compiling, held as long as it takes."""

    def is_compiled(self, grammar: str) -> bool:
        """Whether `matcher` answers at once."""
        return grammar in self._kept

    @property
    def num_bytes(self) -> int:
        """Bytes that all compiled grammars take."""
        return sum(each.num_bytes for each in list(self._alive))

    @property
    def has_room(self) -> bool:
        """Whether one more may be compiled. One always may while no request uses any."""
        with self._lock:
            self._drop_unused(MOST_BYTES)
            return self.num_bytes <= MOST_BYTES or not any(each.is_used for each in self._alive)

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of the grammar. Raises `GrammarFault` for one that cannot be
        compiled.
        """
        found = self._find(grammar)
        if found is None:
            with self._turn:
                found = self._find(grammar) or self._keep(grammar, self._compile(grammar))
        return found.at_the_beginning()

    def forget(self, grammar: str) -> None:
        """Compile it anew for the next request: a matcher that has come to a bound has filled the
        lexer that all of one grammar share.
        """
        with self._lock:
            self._kept.pop(grammar, None)

    def _find(self, grammar: str) -> _Compiled | None:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def _keep(self, grammar: str, made: _Compiled) -> _Compiled:
        with self._lock:
            self._drop_unused(MOST_BYTES - made.num_bytes)
            self._kept[grammar] = made
            self._alive.add(made)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _drop_unused(self, most: int) -> None:
        """Drop grammars that no request uses, the least recently used first."""
        excess = self.num_bytes - most
        for grammar, each in list(self._kept.items()):
            if excess <= 0:
                break
            if not each.is_used:
                del self._kept[grammar]
                self._alive.discard(each)
                excess -= each.num_bytes

    def _compile(self, grammar: str) -> _Compiled:
        if self._tokenizer is None:
            self._tokenizer = _vocabulary(self._load(), self._vocab_size, self._eos)
        before = allocated_memory()
        matcher = compiled(self._tokenizer, grammar)
        if matcher.is_error():
            return _Compiled(None, f"its grammar: {reason_of(matcher)}", len(grammar))
        # The first mask takes more memory and time than all else about some grammars.
        first = Matcher(matcher.deep_copy())
        first.fill(np.zeros(-(-self._vocab_size // 32), np.int32))
        after = allocated_memory()
        if before is None or after is None:
            num_bytes = len(grammar) * _BYTES_A_CHARACTER
        else:
            # What other threads have freed meanwhile makes no grammar smaller than its text.
            num_bytes = max(after - before, len(grammar))
        if num_bytes > _MOST_OF_ONE:
            fault = (
                f"its grammar takes {num_bytes / 2**20:.0f} MB of memory, more than "
                f"{_MOST_OF_ONE // 2**20}"
            )
            return _Compiled(None, fault, len(grammar))
        return _Compiled(matcher, None, num_bytes)


def _vocabulary(tokenizer: Tokenizer, size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(each for each in eos_token_ids.union(tokenizer.end_token_ids) if each < size)
    if not ends:
        raise ValueError("a grammar needs a token that ends a text, and the model names none")
    wrapper = TokenizerWrapper(Vocabulary(tokenizer, size))
    return LLTokenizer(wrapper, n_vocab=size, eos_token=ends, slices=_SLICES)
