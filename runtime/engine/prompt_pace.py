"""Decides how many tokens a step may have while answers wait for it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ..executor.step import PendingStep

_DECODES = 4  # A step may take as long as this many decodes, even if that is over the limit.
_HALF = 512  # The weight of a step halves after so many tokens of later steps.
_DECAY = 0.9  # The share of the old average that a new decode keeps.
_WIDE = 1024  # Longer steps do not make a token cheaper.
# If a token takes over _WASTE times its time in the longest steps, steps grow. Below _THRIFT times,
# they shrink.
_WASTE, _THRIFT = 1.5, 1.3
_MOST_TIMES = 2  # How many times the goal a step may take for that reason.
_MOST_TOKENS = 2**31  # More than any step has.
_CHANGE = 1.25  # Factor by which steps become longer or shorter for that reason.


class PromptPace:
    """Keeps steps that compute prompts beside answers short, by the speed of earlier steps.

        pace.read(step)    # each step with tokens that have arrived
        pace.limit()       # most tokens of the next step, if answers wait for it

    The time of a step with prompts grows with its tokens, and each running answer gets its next
    token when the step ends. Where short steps waste time (experts, busy cores) and prompts would
    take over 1.5 times as long, steps become longer, up to twice the goal. Only rank 0 has measured
    times, so it tells the others the limit.
    """

    def __init__(
        self,
        seconds: float,
        sizes: Callable[[], Sequence[int]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`seconds` is the time that such a step should take; 0: no limit. `sizes` returns the
        lengths of steps that graphs are captured for, in ascending order.
        """
        self._goal, self._sizes, self._clock = seconds, sizes, clock
        # Sums of earlier steps with prompts, in which later steps count more.
        self._tokens = self._seconds = 0.0
        self._decode = 0.0  # Seconds that a step without prompts takes.
        self._wide, self._best = 0, 0.0  # Length of the longest step, and its seconds per token.
        self._least = 0.0  # Tokens below which steps waste time.
        self._limit = 0
        self._last_read = 0.0
        # Tokens of the steps before that nothing waited for, and when the first of them began.
        self._unread_tokens = 0
        self._unread_since: float | None = None

    def read(self, step: PendingStep) -> None:
        """Note that the tokens of a step have just arrived."""
        began = step.began if self._unread_since is None else self._unread_since
        if not step.waits:
            # The device may still compute it, so its time ends with that of a later step.
            self._unread_tokens, self._unread_since = self._unread_tokens + step.num_tokens, began
            return
        now, tokens = self._clock(), step.num_tokens + self._unread_tokens
        has_prompts = step.has_prompts or self._unread_tokens > 0
        self._unread_tokens, self._unread_since = 0, None
        seconds, self._last_read = now - max(self._last_read, began), now
        if has_prompts:
            kept = 0.5 ** (tokens / _HALF)
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + seconds
            self._judge(tokens, seconds / tokens, is_mixed=step.is_mixed)
        elif not step.has_given_rows:
            kept = _DECAY if self._decode else 0.0
            self._decode = self._decode * kept + seconds * (1 - kept)

    def _judge(self, tokens: int, rate: float, *, is_mixed: bool) -> None:
        """Compare the time of a token with that in the longest steps."""
        wide = min(tokens, _WIDE)
        if wide >= self._wide:
            self._best = rate if wide > self._wide else self._best + (rate - self._best) / 4
            self._wide = wide
        # Much shorter steps than the limit say nothing about it.
        if is_mixed and 2 * tokens >= self._limit:
            usual = self._seconds / self._tokens
            if min(rate, usual) > _WASTE * self._best:
                self._least = min(_CHANGE * max(self._least, tokens), _WIDE)
            elif rate < _THRIFT * self._best:
                self._least /= _CHANGE

    def limit(self) -> int | None:
        """Return the limit; None: there is none.

        Prefer the length of a captured graph, unless that is less than half of the limit.
        """
        if not self._goal or not self._tokens:
            return None
        goal = max(self._goal, _DECODES * self._decode)
        fitting = goal * self._tokens / self._seconds
        most = max(1, int(min(max(fitting, self._least), _MOST_TIMES * fitting, _MOST_TOKENS)))
        sizes = self._sizes()
        place = bisect_right(sizes, most)
        self._limit = sizes[place - 1] if place and 2 * sizes[place - 1] > most else most
        return self._limit
