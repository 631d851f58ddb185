"""Which tokens a request gets from those that a step sampled."""

from __future__ import annotations

from ..core.generation import FinishReason, TokenLogprob
from ..core.request import Request


def take(
    request: Request, sampled: list[int], logprobs: list[TokenLogprob] | None
) -> tuple[list[int], list[TokenLogprob] | None, FinishReason | None]:
    """Return the tokens that a request gets, their log-probabilities, and why it ends.

    Each sampled token is extended as if a step had given it alone. The sampled tokens after it
    count as far as they are what it is extended by.
    """
    tokens, probabilities, reason = list[int](), list[TokenLogprob](), None
    sampled = sampled[: request.max_tokens - request.num_known]
    while reason is None and len(tokens) < len(sampled) and tokens == sampled[: len(tokens)]:
        done = len(tokens)
        room = request.max_tokens - request.num_known - done
        more, kept, reason = _extend(request, sampled[done], room)
        tokens += more
        if logprobs is not None:
            # The model did not choose the other tokens, so their probability is 1.
            certain = [TokenLogprob(token_id=token, logprob=0.0) for token in more[kept:]]
            probabilities += logprobs[done : done + kept] + certain
    return tokens, None if logprobs is None else probabilities, reason


def _extend(request: Request, token: int, room: int) -> tuple[list[int], int, FinishReason | None]:
    """Extend a sampled token by those that close a thought and those that the grammar forces.

    Return at most `room` tokens, the number of sampled ones among them, and why the request
    ends. The end of a thought may replace the sampled token.
    """
    grammar, tokens, kept = request.grammar, [token], 1
    if request.thought is not None:
        sampled, closing = request.thought.follow(tokens, grammar)
        tokens, kept = (sampled + closing)[:room], len(sampled)
    for count, each in enumerate(tokens, 1):
        if each in request.stop_ids:
            return tokens[:count], kept, FinishReason.STOP
    if grammar is None:
        return tokens, kept, None
    for count, each in enumerate(tokens, 1):
        grammar.accept([each])
        if grammar.is_finished:
            return tokens[:count], kept, FinishReason.STOP
    if request.params.logprobs is None:
        # Forced tokens take no forward, so they have no log-probabilities.
        forced = grammar.forced()[: max(0, room - len(tokens))]
        if forced and request.stop_ids.isdisjoint(forced):
            grammar.accept(forced)
            if request.thought is not None:
                request.thought.pass_over(forced)
            tokens = tokens + forced
    return tokens, kept, FinishReason.STOP if grammar.is_finished else None
