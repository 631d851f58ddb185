"""The answers of `/completion` and `/infill`, whole or in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.core.generation import FinishReason, TokenLogprob
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import Answer
from ..observability.sequence_clock import SequenceClock
from ..openai.logprobs import finite
from ..serving.sse import encode_json
from ..serving.state import Serving
from .requests import GenerationBody

_RANDOM_SEED = 2**32 - 1  # llama.cpp's number of a random seed.


class Timings(Answer):
    """Times in milliseconds. `cache_n` tokens of the prompt were found in the prefix cache, and
    `prompt_n` were computed.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class TokenProbability(Answer):
    """`token` has U+FFFD for a part of a character. `bytes` are the exact bytes."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class ChosenProbability(TokenProbability):
    top_logprobs: list[TokenProbability]


class GenerationSettings(Answer, kw_only=True):
    """The parameters of a completion, after defaults and limits. `n_predict` is -1 without a
    limit.
    """

    n_ctx: int
    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    stop: list[str]
    ignore_eos: bool
    stream: bool
    n_probs: int
    grammar: str
    timings_per_token: bool


class CompletionPiece(Answer, kw_only=True):
    """The next piece of a streamed completion. `timings` are set if `timings_per_token` is true."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: Literal[False] = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[ChosenProbability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class CompletionAnswer(Answer, kw_only=True):
    """A whole completion, or the end of a streamed one, whose content is empty.

    `tokens_evaluated` are those of the prompt, of which `tokens_cached` were found in the prefix
    cache. `truncated` tells that the context had no room for more. `stop_type` is `none` if the
    request was aborted.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "word", "limit"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[ChosenProbability] | UnsetType = UNSET


def settings_of(
    serving: Serving, body: GenerationBody, request: RequestState
) -> GenerationSettings:
    params = request.params
    most = -1 if body.token_limit is None else body.token_limit
    return GenerationSettings(
        n_ctx=serving.limits.context_length,
        n_predict=most,
        max_tokens=most,
        seed=_RANDOM_SEED if params.seed is None else params.seed,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        repeat_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()),
        stop=request.text.stop,
        ignore_eos=params.ignore_eos,
        stream=body.stream,
        n_probs=body.n_probs,
        grammar=body.grammar,
        timings_per_token=body.timings_per_token,
    )


class CompletionWriter:
    """Writes one sequence. `prompt` is its prompt as text."""

    def __init__(
        self,
        serving: Serving,
        body: GenerationBody,
        request: RequestState,
        clock: SequenceClock,
        *,
        index: int,
        prompt: str,
    ) -> None:
        self._serving, self._body, self._request, self._clock = serving, body, request, clock
        self._index, self._prompt = index, prompt
        self._has_new_line = False

    def whole(self, output: RequestOutput) -> msgspec.Raw:
        """Return the whole completion as JSON."""
        self._has_new_line = "\n" in output.text
        tokens = output.token_ids if self._body.return_tokens else []
        return self._end(output, output.text, tokens, self._probabilities(output))

    def pieces(self, output: RequestOutput) -> list[msgspec.Raw]:
        """Return the pieces for new output of a streamed completion, as JSON."""
        written = []
        self._has_new_line |= "\n" in output.text
        if output.text or output.token_ids:
            piece = CompletionPiece(
                index=self._index,
                content=output.text,
                tokens=output.token_ids,
                tokens_predicted=output.completion_tokens,
                tokens_evaluated=output.prompt_tokens,
                completion_probabilities=self._probabilities(output),
                timings=self._timings(output) if self._body.timings_per_token else UNSET,
            )
            written.append(msgspec.Raw(encode_json(piece)))
        if output.finish_reason is not None:
            written.append(self._end(output, "", [], UNSET))
        return written

    def _end(
        self,
        output: RequestOutput,
        content: str,
        tokens: list[int],
        probabilities: list[ChosenProbability] | UnsetType,
    ) -> msgspec.Raw:
        request, matched = self._request, output.matched_stop
        ended = output.finish_reason == FinishReason.STOP
        at_limit = output.finish_reason == FinishReason.LENGTH
        most = self._body.token_limit
        answer = CompletionAnswer(
            index=self._index,
            content=content,
            tokens=tokens,
            model=self._serving.model_name,
            tokens_predicted=output.completion_tokens,
            tokens_evaluated=output.prompt_tokens,
            generation_settings=settings_of(self._serving, self._body, request),
            prompt=self._prompt,
            has_new_line=self._has_new_line,
            truncated=at_limit and (most is None or most > request.params.max_new_tokens),
            stop_type="limit"
            if at_limit
            else "none"
            if not ended
            else "word"
            if isinstance(matched, str)
            else "eos",
            stopping_word=matched if isinstance(matched, str) else "",
            tokens_cached=output.cached_tokens,
            timings=self._timings(output),
            completion_probabilities=probabilities,
        )
        return msgspec.Raw(encode_json(_selected(answer, self._body.response_fields)))

    def _timings(self, output: RequestOutput) -> Timings:
        clock = self._clock
        first = clock.first_token or clock.arrival
        prompt_ms = 1000 * (first - (clock.started or clock.arrival))
        predicted_ms = 1000 * ((clock.last_token or first) - first)
        computed = output.prompt_tokens - output.cached_tokens
        return Timings(
            output.cached_tokens,
            computed,
            prompt_ms,
            *_rates(computed, prompt_ms),
            output.completion_tokens,
            predicted_ms,
            *_rates(output.completion_tokens, predicted_ms),
        )

    def _probabilities(self, output: RequestOutput) -> list[ChosenProbability] | UnsetType:
        if not self._body.n_probs:
            return UNSET
        tokenizer = self._serving.engine.tokenizer
        return [_chosen(tokenizer, entry) for entry in output.logprobs or ()]


def _rates(tokens: int, milliseconds: float) -> tuple[float, float]:
    """Return milliseconds per token and tokens per second, 0 for unknown ones."""
    return (
        milliseconds / tokens if tokens else 0.0,
        1000 * tokens / milliseconds if milliseconds else 0.0,
    )


def _chosen(tokenizer: Tokenizer, entry: TokenLogprob) -> ChosenProbability:
    def token(token_id: int, logprob: float) -> tuple[int, str, list[int], float]:
        content = tokenizer.token_bytes(token_id)
        return token_id, content.decode("utf-8", "replace"), list(content), finite(logprob)

    top = [TokenProbability(*token(*each)) for each in entry.top]
    return ChosenProbability(*token(entry.token_id, entry.logprob), top)


def _selected(answer: Answer, names: Sequence[str]) -> Any:
    """Return the named members of an answer, or the answer if no name is given.

    A name such as `timings/prompt_n` stands for a member of a member.
    """
    if not names:
        return answer
    found: dict[str, Any] = {}
    for name in names:
        value: Any = answer
        for part in name.split("/"):
            # Not any attribute: only members.
            fields = getattr(value, "__struct_fields__", ())
            value = getattr(value, part) if part in fields else UNSET
        if value is not UNSET:
            found[name] = value
    return found
