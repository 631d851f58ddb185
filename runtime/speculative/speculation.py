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

import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..core.request import Request
from .method import Drafter, Guess, Method, Proposer
from .prediction import Prediction
from .step_costs import DecodeCosts
from .trials import Trials

_MEMORY = 0.9  # Weight of earlier guesses of a request after one more.
_PRIOR = 4.0  # How many guesses of a request weigh as much as all those of its kind.
_LONG_MEMORY = 0.999
_ASSUMED = 8.0  # Weight of what is assumed before guesses were seen.
_GAIN = 1.02  # Least factor in tokens per second that is worth proposals.
_LEAST_VALUE = 0.02  # Chance below which a token is no proposal.
_DRAFTED = "all 0"  # The kind of all drafts of a model.
_VALUE = itemgetter(0)
_LEARNT = 16.0  # Weight of a rate from which on all requests have drafts.
_TRIED = 2  # Tokens of a draft that is not expected to pay.
# A request whose step computes more right tokens again, because a recurrent state went back before
# them, verifies nothing. Else wrong guesses in several steps would make ever longer steps.
_MOST_AGAIN = 8


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
    """The proposers of one request, and what they guess now.

    Attributes:
        guesses: By the name of the method.
        best: The name of the method whose guess is the likeliest, or "".
        proposed_by: The method of the proposals that are being verified.
        rates: How often guesses of this request were right, by method and kind.
    """

    __slots__ = ("best", "guesses", "proposed_by", "proposers", "rates")

    def __init__(self, proposers: dict[str, Proposer]) -> None:
        self.proposers = proposers
        self.guesses: dict[str, Guess] = {}
        self.best = self.proposed_by = ""
        self.rates: dict[tuple[str, str], _Rate] = {}


class _Choice(NamedTuple):
    """How many tokens each request should verify: of its guess, and of a draft.

    Attributes:
        is_trial: Whether the drafts are not expected to pay.
    """

    looked_up: dict[Request, int]
    drafted: dict[Request, int]
    is_trial: bool = False


class Speculation:
    """Proposals for all requests of an engine.

    Args:
        methods: What guesses from texts.
        drafter: A model that guesses, for requests without a better guess.
        most: Most proposals of a request and step.
        max_rows: Rows up to which a step is cheap.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        *,
        most: int,
        max_rows: int,
        drafter: Drafter | None = None,
    ) -> None:
        self._methods, self._drafter = methods, drafter
        self._most, self._max_rows = most, max_rows
        self._rates: dict[tuple[str, str], _Rate] = {}
        self.costs = DecodeCosts()
        self._trials = Trials()
        self._drafts = self._proposed = 0
        self._accepted_at = Counter[int]()

    def learn(self, request: Request, tokens: list[int], proposals: list[int]) -> None:
        """Note the tokens that a step gave a request, and guess what follows them.

        `proposals` are those that the step verified.
        """
        guesses: _Guesses | None = request.guesses
        if guesses is None:
            if request.prompt_logprobs_due:
                return
            begun = {each.name: each.begin(request) for each in self._methods}
            guesses = _Guesses({name: one for name, one in begun.items() if one is not None})
            request.guesses = guesses
        else:
            if proposals:
                self._count(request, guesses, tokens, proposals)
            for method, last in guesses.guesses.items():
                self._compare(guesses, (method, last.kind), last.tokens, tokens)
            for proposer in guesses.proposers.values():
                proposer.append(tokens)
        found = {
            name: guess
            for name, proposer in guesses.proposers.items()
            if (guess := proposer.guess(self._most)) is not None
        }
        guesses.guesses, guesses.best = found, next(iter(found), "")
        if len(found) > 1:
            guesses.best = max(
                found, key=lambda name: self._chance(guesses, (name, found[name].kind))
            )

    def _count(
        self, request: Request, guesses: _Guesses, tokens: list[int], proposals: list[int]
    ) -> None:
        accepted = num_alike(tokens, proposals)
        self._drafts += 1
        self._proposed += len(proposals)
        self._accepted_at.update(range(accepted))
        if guesses.proposed_by == Prediction.name:
            request.predicted = accepted, len(proposals) - accepted
        if self._drafter is not None and guesses.proposed_by == self._drafter.name:
            self._compare(guesses, (self._drafter.name, _DRAFTED), proposals, tokens)

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

    def end(self, request: Request) -> None:
        """Learn from a request that has ended."""
        for method in self._methods:
            method.end(request)

    def drop_finished(self) -> None:
        """Free what requests held that have ended, in whatever way."""
        if self._drafter is not None:
            self._drafter.drop_finished()

    def check(self) -> None:
        """Assert that the drafter leaks no memory."""
        if self._drafter is not None:
            self._drafter.check()

    def is_of_use(self, running: list[Request]) -> bool:
        """Whether a step with proposals is expected to pay. If not, the step has none."""
        choice = self._choose(running)
        is_of_use = bool(choice.looked_up or choice.drafted)
        if not is_of_use:
            self._trials.note(pays=False)
        return is_of_use

    def propose(self, running: list[Request]) -> dict[str, list[int]]:
        """Return the tokens to verify by request."""
        looked_up, drafted, is_trial = self._choose(running)
        found = {
            request: request.guesses.guesses[request.guesses.best].tokens[:count]
            for request, count in looked_up.items()
        }
        for request in looked_up:
            request.guesses.proposed_by = request.guesses.best
        if self._drafter is not None:
            began = time.perf_counter()
            for request, tokens in self._drafter.draft(running, drafted).items():
                found[request], request.guesses.proposed_by = tokens, self._drafter.name
            self.costs.drafted(time.perf_counter() - began)
            self._trials.note(pays=bool(drafted) and not is_trial)
        allowed = {request.rid: _allowed(request, tokens) for request, tokens in found.items()}
        return {rid: tokens for rid, tokens in allowed.items() if tokens}

    def _choose(self, running: list[Request]) -> _Choice:
        decodes = [
            each
            for each in running
            if each.num_computed >= each.num_prompt
            and each.guesses is not None
            and each.max_tokens - each.num_known > 1
            and (each.state is None or each.num_tokens - each.num_computed <= _MOST_AGAIN)
        ]
        rows, expected, more = len(running), float(len(running)), self.costs.of_row
        if running and running[0].state is not None:
            rows += sum(each.num_tokens - each.num_computed - 1 for each in decodes)
            more *= 2  # After a wrong guess, the right ones before it are computed again.
        seconds = self.costs.verifying(rows)
        rate = _GAIN * expected / self.costs.plain(rows)
        # The values of the next tokens of each guess: the chance that all up to it are right. A
        # value below the time of its row times the rate lowers the rate.
        least = max(_LEAST_VALUE, more * rate)
        offers: list[tuple[float, Request]] = []
        for request in decodes:
            guesses: _Guesses = request.guesses
            if not guesses.best:
                continue
            guess, value = guesses.guesses[guesses.best], 1.0
            chance = self._chance(guesses, (guesses.best, guess.kind))
            for _ in guess.tokens[: request.max_tokens - request.num_known - 1]:
                value *= chance
                if value < least:
                    break
                offers.append((value, request))
        offers.sort(key=_VALUE, reverse=True)
        best, gained = 0, 0.0
        for count, (value, _) in enumerate(offers[: max(0, self._max_rows - rows)], 1):
            expected += value
            if (faster := expected / (seconds + count * more)) > rate:
                rate, best, gained = faster, count, expected - len(running)
        looked_up = dict(Counter(request for _, request in offers[:best]))
        if self._drafter is None:
            return _Choice(looked_up, {})
        others = [request for request in decodes if request not in looked_up]
        rows, expected = rows + best, len(running) + gained
        return _Choice(looked_up, *self._drafts_of(self._drafter, others, rows, expected, rate))

    def _drafts_of(
        self, drafter: Drafter, requests: list[Request], rows: int, expected: float, rate: float
    ) -> tuple[dict[Request, int], bool]:
        """Return how many tokens to draft for each request, and whether that is a trial.

        Without them, the step has `rows` rows and gives `expected` tokens, `rate` a second.
        """
        if not requests:
            return {}, False
        key = drafter.name, _DRAFTED
        chances = [self._chance(each.guesses, key) for each in requests]
        values = [1.0] * len(requests)
        best = 0
        for count in range(1, min(drafter.steps, (self._max_rows - rows) // len(requests)) + 1):
            values = [value * chance for value, chance in zip(values, chances, strict=True)]
            expected += sum(values)
            seconds = self.costs.verifying(rows + count * len(requests))
            seconds += count * drafter.seconds(len(requests))
            if (faster := expected / seconds) > rate:
                rate, best = faster, count
        is_trial = not best and self._trials.is_due
        if is_trial:
            best = min(_TRIED, drafter.steps)
        if is_trial or self._overall(key).weight < _LEARNT:
            # A drafter computes the whole text of a request before it drafts.
            requests = [
                min(requests, key=lambda each: (key not in each.guesses.rates, each.num_tokens))
            ]
        room = {each: each.max_tokens - each.num_known - 1 for each in requests}
        return ({each: min(best, room[each]) for each in requests} if best else {}), is_trial

    def _chance(self, guesses: _Guesses, key: tuple[str, str]) -> float:
        """Return the expected share of right tokens, each after right ones."""
        overall, own = self._overall(key).value, guesses.rates.get(key)
        if own is None:
            return overall
        return (own.right + _PRIOR * overall) / (own.weight + _PRIOR)

    def _overall(self, key: tuple[str, str]) -> _Rate:
        rate = self._rates.get(key)
        if rate is None:
            method, kind = key
            digits = int(kind.rsplit(" ", 1)[-1])
            # Longer agreement makes a right guess likelier.
            known = {Prediction.name: 0.9, "draft": 0.6}
            right = known.get(method, min(0.25 + 0.1 * digits, 0.8))
            rate = self._rates[key] = _Rate(_ASSUMED * right, _ASSUMED)
        return rate

    def _compare(
        self, guesses: _Guesses, key: tuple[str, str], guessed: list[int], tokens: list[int]
    ) -> None:
        """Count guessed tokens up to the first wrong one."""
        own, overall = guesses.rates.setdefault(key, _Rate(0.0, 0.0)), self._overall(key)
        for one, token in zip(guessed, tokens, strict=False):
            own.add(one == token, _MEMORY)
            overall.add(one == token, _LONG_MEMORY)
            if one != token:
                break


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
