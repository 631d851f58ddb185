"""Turns the tokens of a step into the outputs of requests: text, finish reasons and counts.

>>> state = RequestState("r", tokenizer.encode("Hi"), SamplingParams(), tokenizer)
>>> state.deliver = print
>>> process_outputs({"r": state}, [TokenOutput(rid="r", token_ids=[5])])

Texts are cut at stop strings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..core.generation import FinishReason, GenerateRequest, TokenLogprob, TokenOutput
from ..core.images import ImageInput
from ..core.sampling_params import SamplingParams
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FAULT = "its output could not be processed; the log has the details"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text.

    Attributes:
        stop: Strings that end the text and are not part of it, unless `include_stop`.
        visible: Special tokens that are always part of the text.
    """

    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    visible: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """New output of a request since the last output.

    Attributes:
        text: May be behind `token_ids` while a character is incomplete or may become a stop string.
            The output with `finish_reason` has the rest.
        matched_stop: The stop string or token id that ended the text.
        completion_tokens: Number of all tokens up to now.
        error, code: See `TokenOutput`.
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
    code: str | None = None


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Return several consecutive outputs of one request as one output."""
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


class RequestState:
    """One request in the text process, with its output up to now, so that it can be resumed if the
    engine dies.

    Attributes:
        name: The client's name of the request, if it is not the id.
        belongs_to: Ids of the client's requests that contain this request. They abort it, too.
        deliver: Called with each output.
        prediction_ids, tenant, adapter, images, keep, client: See `GenerateRequest`.
        affinity: Requests with the same text go to the same replica. "": any replica.
        adapter_name: The name by which the client chose the adapter.
        accepted_prediction, rejected_prediction: Sums of `TokenOutput.predicted`.
    """

    deliver: Callable[[RequestOutput], None]

    def __init__(
        self,
        rid: str,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        text: TextOptions | None = None,
        priority: int = 0,
        arrival_time: float = 0.0,
        belongs_to: frozenset[str] = frozenset(),
        name: str | None = None,
        prediction_ids: Sequence[int] = (),
        tenant: str = "",
        adapter: str = "",
        adapter_name: str = "",
        images: Sequence[ImageInput] = (),
        keep: Sequence[tuple[int, float]] = (),
        client: str = "",
        affinity: str = "",
    ) -> None:
        self.rid = rid
        self.name = name or rid
        self.prompt_ids = prompt_ids
        self.params = params
        self.text = text or TextOptions()
        self.priority = priority
        self.arrival_time = arrival_time
        self.belongs_to = belongs_to
        self.prediction_ids, self.tenant, self.adapter = prediction_ids, tenant, adapter
        self.adapter_name = adapter_name
        self.images, self.keep, self.client, self.affinity = images, keep, client, affinity
        self.accepted_prediction = self.rejected_prediction = 0
        self.output_ids: list[int] = []
        self.finished = False
        # Whether the current engine process has sent a token of the request.
        self.delivered = False
        self.cached_tokens: int | None = None
        self.loaded = (0, 0)  # That of `TokenOutput`.
        self.started: float | None = None  # Start of the computation, by `time.monotonic`.
        self.prompt_logprobs_sent = False
        self.eos_token_ids = tokenizer.end_token_ids
        self.detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            stop=self.text.stop,
            include_stop=self.text.include_stop,
            skip_special_tokens=self.text.skip_special_tokens,
            visible=self.text.visible,
            min_tokens=params.min_new_tokens,
        )

    @property
    def image_tokens(self) -> int:
        """Number of positions of images in the prompt."""
        return sum(image.num_tokens for image in self.images)

    def goes_by(self, rid: str) -> bool:
        """Return whether `rid` names this request."""
        return rid in (self.rid, self.name) or rid in self.belongs_to

    def to_message(self) -> GenerateRequest:
        """Return the message for the engine: the prompt and every token that was delivered."""
        return GenerateRequest(
            rid=self.rid,
            input_ids=self.prompt_ids,
            params=self.params,
            output_ids=list(self.output_ids),
            priority=self.priority,
            arrival_time=self.arrival_time,
            eos_token_ids=self.eos_token_ids,
            prediction_ids=list(self.prediction_ids),
            tenant=self.tenant,
            adapter=self.adapter,
            images=list(self.images),
            keep=list(self.keep),
            client=self.client,
        )

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request with the text that was held back. Must not fail, because it ends failed
        requests, too.
        """
        self.finished = True
        try:
            text = self.detokenizer.finish()
        except Exception:
            text = ""
        self.deliver(
            RequestOutput(
                text=text,
                token_ids=[],
                finish_reason=reason,
                prompt_tokens=len(self.prompt_ids),
                completion_tokens=len(self.output_ids),
                cached_tokens=self.cached_tokens or 0,
                error=error,
            )
        )


class Processed(NamedTuple):
    """`ended` are requests that ended. `to_abort` are those that the engine still runs."""

    ended: list[str]
    to_abort: list[str]


def process_outputs(
    states: Mapping[str, RequestState], outputs: Iterable[TokenOutput]
) -> Processed:
    """Deliver the results of one step. An error in one request ends only that request."""
    processed = Processed([], [])
    for output in outputs:
        state = states.get(output.rid)
        if state is None or state.finished:  # aborted while the step ran
            continue
        try:
            # 1. Text. A stop or end-of-sequence token counts as generated, but is not text.
            ids, reason, matched = output.token_ids, output.finish_reason, output.stop_token_id
            text, stop, used = state.detokenizer.push(ids if matched is None else ids[:-1])

            # 2. The end. Tokens after a stop string are dropped. Otherwise the last output has the
            # text that was held back.
            if stop is not None:
                ids, reason = ids[:used], FinishReason.STOP
            elif reason is not None:
                text += state.detokenizer.finish()
            state.finished = reason is not None

            # 3. Counts, and values that are sent once, even if a restarted engine sends them again.
            state.delivered = True
            state.output_ids += ids
            state.accepted_prediction += output.predicted[0]
            state.rejected_prediction += output.predicted[1]
            if state.cached_tokens is None:
                state.cached_tokens, state.loaded = output.cached_tokens, output.loaded
            prompt_logprobs = None if state.prompt_logprobs_sent else output.prompt_logprobs
            state.prompt_logprobs_sent |= prompt_logprobs is not None

            # 4. Delivery.
            state.deliver(
                RequestOutput(
                    text=text,
                    token_ids=ids,
                    logprobs=None if output.logprobs is None else output.logprobs[: len(ids)],
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=reason,
                    matched_stop=matched if stop is None else stop,
                    prompt_tokens=len(state.prompt_ids),
                    completion_tokens=len(state.output_ids),
                    cached_tokens=state.cached_tokens,
                    error=output.error,
                    code=output.code,
                )
            )
        except Exception:
            logger.exception("request %s ends: its output could not be processed", output.rid)
            try:
                state.end(FinishReason.ERROR, _FAULT)
            except Exception:
                logger.exception("request %s cannot be told that it has ended", output.rid)
        if state.finished:
            processed.ended.append(output.rid)
            # After a stop string, or an error here, the engine would continue.
            if output.finish_reason is None:
                processed.to_abort.append(output.rid)
    return processed
