"""Decides which tokens a step verifies.

A step reads all weights once, for one row or for several. Where decoding waits for memory, a few
more rows cost little. Each row that verifies a proposal costs time for certain, and gives a token
if the proposal and those before it are right. Rows are given out, the most promising first, as long
as they raise the expected number of tokens per second.

How often a kind of guess is right is learnt from all guesses, also from those that no step
verifies: the next tokens of the request show whether the guess was right. A request whose guesses
are wrong therefore costs no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..core.request import Request
from .method import Guess, Method, Proposer
from .prediction import Prediction
from .step_costs import StepCosts

_MEMORY = 0.9  # Weight of earlier guesses of a request after one more.
_PRIOR = 4.0  # How many guesses of a request weigh as much as all those of its kind.
_LONG_MEMORY = 0.999
_GAIN = 1.02  # Least factor in tokens per second that is worth proposals.


class _Rate:
    """How often guesses are right: a share of recent ones."""

    __slots__ = ("right", "weight")

    def __init__(self, right: float, weight: float) -> None:
        self.right, self.weight = right, weight

    def add(self, is_right: bool, memory: float) -> None:
        self.right = self.right * memory + is_right
        self.weight = self.weight * memory + 1.0

    @property
    def value(self) -> float:
        return self.right / self.weight


class _Guesses:
    """The proposers of one request, and its current guess."""

    __slots__ = ("guess", "method", "proposers", "rates")

    def __init__(self, proposers: list[tuple[str, Proposer]]) -> None:
        self.proposers = proposers
        self.guess: Guess | None = None
        self.method = ""
        self.rates: dict[tuple[str, str], _Rate] = {}


class Speculation:
    """Proposals for all requests of an engine.

    Args:
        methods: In order of preference: the first one that has a guess makes it.
        most: Most proposals of a request and step.
        max_rows: Rows up to which a step is cheap.
    """

    def __init__(self, methods: Sequence[Method], *, most: int, max_rows: int) -> None:
        self._methods = methods
        self._most, self._max_rows = most, max_rows
        self._rates: dict[tuple[str, str], _Rate] = {}
        self._costs = StepCosts()
        self._drafts = self._proposed = 0
        self._accepted_at = Counter[int]()

    def learn(self, request: Request, tokens: list[int], proposals: list[int]) -> None:
        """Note the tokens that a step gave a request, and guess what follows them.

        `proposals` are those that the step verified.
        """
        guesses: _Guesses | None = request.guesses
        if guesses is None:
            if request.state is not None or request.prompt_logprobs_due:
                return
            begun = [(each.name, each.begin(request)) for each in self._methods]
            guesses = _Guesses([(name, one) for name, one in begun if one is not None])
            request.guesses = guesses
        else:
            self._compare(guesses, tokens)
            if proposals:
                accepted = num_alike(tokens, proposals)
                self._drafts += 1
                self._proposed += len(proposals)
                self._accepted_at.update(range(accepted))
                if guesses.method == Prediction.name:
                    request.predicted = accepted, len(proposals) - accepted
            for _, proposer in guesses.proposers:
                proposer.append(tokens)
        guesses.guess = None
        for name, proposer in guesses.proposers:
            guess = proposer.guess(self._most)
            if guess is not None:
                guesses.guess, guesses.method = guess, name
                break

    def totals(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that count proposals."""
        return {
            "drafts_total": self._drafts,
            "draft_tokens_total": self._proposed,
            "accepted_tokens_total": self._accepted_at.total(),
            "accepted_by_position_total": {
                str(position): count for position, count in sorted(self._accepted_at.items())
            },
        }

    def timed(self, rows: int, seconds: float) -> None:
        """Note the time of a step of `rows` rows that only continued answers."""
        self._costs.add(rows, seconds)

    def end(self, request: Request) -> None:
        """Learn from a request that has ended."""
        for method in self._methods:
            method.end(request)

    def is_of_use(self, running: list[Request]) -> bool:
        """Whether a step with proposals is expected to pay."""
        return bool(self._chosen(running))

    def propose(self, running: list[Request]) -> dict[str, list[int]]:
        """Return the tokens to verify by request."""
        proposals = {}
        for request, count in self._chosen(running).items():
            tokens = self._allowed(request, request.guesses.guess.tokens[:count])
            if tokens:
                proposals[request.rid] = tokens
        return proposals

    def _chosen(self, running: list[Request]) -> dict[Request, int]:
        """Return how many tokens of its guess each request should verify."""
        offers: list[tuple[float, Request]] = []
        decodes = 0
        for request in running:
            if request.num_computed < request.num_known - 1 - len(request.proposals):
                continue
            decodes += 1
            guesses: _Guesses | None = request.guesses
            if guesses is None or guesses.guess is None:
                continue
            chance, value = self._chance(guesses), 1.0
            room = request.max_tokens - request.num_known - 1
            for _ in guesses.guess.tokens[: max(0, room)]:
                value *= chance
                if value < 0.02:
                    break
                offers.append((value, request))
        if not offers:
            return {}
        offers.sort(key=lambda offer: -offer[0])
        rows, expected = decodes, float(decodes)
        rate = _GAIN * expected / self._costs.seconds(rows)
        best = 0
        for count, (value, _) in enumerate(offers[: max(0, self._max_rows - rows)], 1):
            expected += value
            if (faster := expected / self._costs.seconds(rows + count)) > rate:
                rate, best = faster, count
        return Counter(request for _, request in offers[:best])

    def _chance(self, guesses: _Guesses) -> float:
        """Return the expected share of right tokens, each after right ones."""
        assert guesses.guess is not None
        key = guesses.method, guesses.guess.kind
        overall = self._overall(key).value
        own = guesses.rates.get(key)
        if own is None:
            return overall
        return (own.right + _PRIOR * overall) / (own.weight + _PRIOR)

    def _overall(self, key: tuple[str, str]) -> _Rate:
        rate = self._rates.get(key)
        if rate is None:
            method, kind = key
            digits = int(kind.rsplit(" ", 1)[-1])
            # Longer agreement makes a right guess likelier.
            right = 0.9 if method == Prediction.name else min(0.25 + 0.1 * digits, 0.8)
            rate = self._rates[key] = _Rate(8.0 * right, 8.0)
        return rate

    def _compare(self, guesses: _Guesses, tokens: list[int]) -> None:
        if guesses.guess is None:
            return
        key = guesses.method, guesses.guess.kind
        own = guesses.rates.setdefault(key, _Rate(0.0, 0.0))
        for guessed, token in zip(guesses.guess.tokens, tokens, strict=False):
            own.add(guessed == token, _MEMORY)
            self._overall(key).add(guessed == token, _LONG_MEMORY)
            if guessed != token:
                break

    @staticmethod
    def _allowed(request: Request, tokens: list[int]) -> list[int]:
        """Return the first tokens that may follow without ending the text."""
        for count, token in enumerate(tokens):
            if token in request.stop_ids:
                tokens = tokens[:count]
                break
        if request.grammar is not None and tokens:
            tokens = tokens[: request.grammar.admits(tokens)]
        return tokens


def num_alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are alike."""
    for count, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return count
    return min(len(tokens), len(others))
