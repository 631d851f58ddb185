"""One sequence seen from the text side: what was asked, what has come so far, and how to ask for
the rest after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..engine.messages import FinishReason, GenerateRequest, TokenLogprob, TokenOutput
from ..sampling.params import SamplingParams
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text. `stop`: strings that end the text and are not part of it unless
    `include_stop`.
    """

    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. `belongs_to`: ids of the requests that it is a part of, by which it
    can be aborted too.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    text: TextOptions = field(default_factory=TextOptions)
    priority: int = 0
    arrival_time: float = 0.0
    belongs_to: frozenset[str] = frozenset()

    def goes_by(self, rid: str) -> bool:
        """Whether whoever says `rid` means this sequence."""
        return rid == self.rid or rid in self.belongs_to


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What is new since the last output of a sequence.

    `text` may lag behind `token_ids` while a character is incomplete or may still become a stop
    string; the output that carries `finish_reason` brings the rest. `matched_stop` is the stop
    string or token id that ended it. `completion_tokens` counts all so far.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Generation:
    """The state of one sequence on the text side: enough to deliver it and, should the engine die,
    to resume it.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.finished = False
        self._cached_tokens: int | None = None
        self._prompt_logprobs_sent = False
        self._eos_token_ids = tokenizer.end_token_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_ids,
            stop=request.text.stop,
            include_stop=request.text.include_stop,
            skip_special_tokens=request.text.skip_special_tokens,
        )

    def to_message(self) -> GenerateRequest:
        """What the engine is asked: the prompt and every token already delivered."""
        return GenerateRequest(
            rid=self.request.rid,
            input_ids=self.request.prompt_ids,
            params=self.request.params,
            output_ids=list(self.output_ids),
            priority=self.request.priority,
            arrival_time=self.request.arrival_time,
            eos_token_ids=self._eos_token_ids,
        )

    def push(self, output: TokenOutput) -> GenerationOutput:
        """Take one step's tokens; tokens behind a stop string are dropped. `finished` tells whether
        it was the last.
        """
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
        token_ids = output.token_ids
        # A stop token or end-of-sequence token counts as generated, but is not text.
        visible = token_ids[:-1] if output.stop_token_id is not None else token_ids
        decoded = self._detokenizer.push(visible)
        reason, matched = output.finish_reason, output.stop_token_id
        text = decoded.text
        matched_stop: str | int | None = matched
        if decoded.stop is not None:
            token_ids = token_ids[: decoded.consumed]
            reason, matched_stop = FinishReason.STOP, decoded.stop
        elif reason is not None:
            text += self._detokenizer.finish()
        self.output_ids += token_ids
        self.finished = reason is not None
        prompt_logprobs = None if self._prompt_logprobs_sent else output.prompt_logprobs
        self._prompt_logprobs_sent |= prompt_logprobs is not None
        return GenerationOutput(
            text=text,
            token_ids=token_ids,
            logprobs=output.logprobs[: len(token_ids)] if output.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self._cached_tokens,
            error=output.error,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> GenerationOutput:
        """End it from this side, with the text that was held back. Cannot fail, for it also ends
        what has failed.
        """
        self.finished = True
        try:
            text = self._detokenizer.finish()
        except Exception:
            text = ""
        return GenerationOutput(
            text=text,
            token_ids=[],
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self._cached_tokens or 0,
            error=error,
        )


def merge(outputs: list[GenerationOutput]) -> GenerationOutput:
    """Several outputs of one sequence, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if any(output.logprobs is not None for output in outputs) else None,
        prompt_logprobs=next(
            (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None),
            None,
        ),
    )
