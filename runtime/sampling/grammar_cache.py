"""Compiles each grammar of an engine once, within a limit of memory.

    grammars.matcher(grammar)     # at the beginning of a text; compiles a new grammar

llguidance does not report the size of a compiled grammar, and its text does not determine the size:
a text of 300,000 letters takes 150 MB, short texts with as many characters take 1 MB. Therefore the
allocator is read before and after.
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

# Limit of all grammars of an engine. Above it, unused grammars are dropped and new grammars wait.
MOST_BYTES = 64 * 2**20
_MOST_OF_ONE = 32 * 2**20
_KEPT = 64  # Number of unused grammars that are kept.
# Memory that the masks of a text add, per second of CPU time: 8 to 40 MB were measured.
_BYTES_A_SECOND = 64 * 2**20
_BYTES_A_CHARACTER = 600  # Estimated size of a grammar, if the system does not report allocations.
_IN_A_STRING = r'[^"\\\x00-\x1F\x7F]'
# Sets of tokens that llguidance allows at once within a string: its own slices and more lengths,
# for strings of bounded length.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_A_STRING}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 13, 17, 30)),
    f"{_IN_A_STRING}+",
]


class _Compiled:
    """A compiled grammar, or the `fault` of a grammar that cannot be compiled.

    `num_bytes` is its size in memory.
    """

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
        """Return a new matcher for one text. Raise `GrammarFault`."""
        if self.matcher is None:
            raise GrammarFault(self.fault)
        matcher = Matcher(self.matcher.deep_copy(), self._spent)
        self._users.add(matcher)
        return matcher

    def _spent(self, seconds: float) -> None:
        self._seconds += seconds


class Grammars:
    """The grammars of an engine. May be used from several threads.

    Args:
        load: Returns the tokenizer. Called for the first grammar.
        vocab_size: V of the model.
        eos_token_ids: The model's own end tokens, besides the tokenizer's.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._load, self._vocab_size, self._eos = load, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        # The kept grammars, and forgotten grammars that requests still use.
        self._alive: weakref.WeakSet[_Compiled] = weakref.WeakSet()
        # Locks: of the compiled grammars, held briefly, and of compiling, held as long as it takes.
        self._lock, self._turn = Lock(), Lock()

    def is_compiled(self, grammar: str) -> bool:
        """Return whether `matcher` returns without compiling."""
        return grammar in self._kept

    @property
    def num_bytes(self) -> int:
        """Size of all compiled grammars in bytes."""
        return sum(each.num_bytes for each in list(self._alive))

    @property
    def has_room(self) -> bool:
        """Whether another grammar may be compiled. Always true if no request uses a grammar."""
        with self._lock:
            self._drop_unused(MOST_BYTES)
            return self.num_bytes <= MOST_BYTES or not any(each.is_used for each in self._alive)

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of the grammar. Raise `GrammarFault`."""
        found = self._find(grammar)
        if found is None:
            with self._turn:
                found = self._find(grammar)
                if found is None:
                    found = self._compile(grammar)
                    with self._lock:
                        self._drop_unused(MOST_BYTES - found.num_bytes)
                        self._kept[grammar] = found
                        self._alive.add(found)
                        while len(self._kept) > _KEPT:
                            self._kept.popitem(last=False)
        return found.at_the_beginning()

    def forget(self, grammar: str) -> None:
        """Compile the grammar again for the next request.

        A matcher that reached a limit has filled the lexer that all matchers of a grammar share.
        """
        with self._lock:
            self._kept.pop(grammar, None)

    def _find(self, grammar: str) -> _Compiled | None:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def _drop_unused(self, most: int) -> None:
        """Drop unused grammars, the least recently used first."""
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
            from llguidance import LLTokenizer, TokenizerWrapper

            tokenizer = self._load()
            ends = sorted(
                each for each in self._eos.union(tokenizer.end_token_ids) if each < self._vocab_size
            )
            if not ends:
                raise ValueError(
                    "a grammar needs a token that ends a text, and the model names none"
                )
            wrapper = TokenizerWrapper(Vocabulary(tokenizer, self._vocab_size))
            self._tokenizer = LLTokenizer(
                wrapper, n_vocab=self._vocab_size, eos_token=ends, slices=_SLICES
            )
        before = allocated_memory()
        matcher = compiled(self._tokenizer, grammar)
        if matcher.is_error():
            return _Compiled(None, f"its grammar: {reason_of(matcher)}", len(grammar))
        # For some grammars the first mask takes more memory and time than all other work.
        first = Matcher(matcher.deep_copy())
        first.fill(np.zeros(-(-self._vocab_size // 32), np.int32))
        after = allocated_memory()
        if before is None or after is None:
            num_bytes = len(grammar) * _BYTES_A_CHARACTER
        else:
            # Other threads may have freed memory meanwhile. A grammar is not smaller than its text.
            num_bytes = max(after - before, len(grammar))
        if num_bytes > _MOST_OF_ONE:
            fault = (
                f"its grammar takes {num_bytes / 2**20:.0f} MB of memory, more than "
                f"{_MOST_OF_ONE // 2**20}"
            )
            return _Compiled(None, fault, len(grammar))
        return _Compiled(matcher, None, num_bytes)
