"""One response while it is generated: its state and its answer at every moment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import copy

from msgspec import UNSET

from ....runtime.core.generation import FinishReason
from ....runtime.core.sampling_params import SamplingParams
from ....runtime.tokenizer.output_processor import RequestOutput
from ...core.errors import ApiError
from ...serving.state import Serving
from ..conversation import Conversation
from ..logprobs import TokenTrail
from .output import OutputItems, ResponseEvent
from .requests import ResponsesRequest
from .response import (
    LIVE,
    RESPONSE_ID,
    ConversationId,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseError,
    ResponseReasoning,
    ResponseText,
    ResponseUsage,
    Status,
)
from .tools import HostedTool, PromptTool, by_function_name

_NO_USAGE = ResponseUsage(0, InputTokensDetails(0), 0, OutputTokensDetails(0), 0)


class LiveResponse:
    """A response.

    Attributes:
        status: One of OpenAI's states.
        is_stored: Whether the response can be retrieved by its id.
        size: Size of the request in bytes.
        output: The output items.
        conversation: Id of the conversation to which the response's items are added.
    """

    def __init__(
        self,
        serving: Serving,
        body: ResponsesRequest,
        response_id: str,
        conversation: Conversation | None,
        *,
        is_stored: bool,
        size: int,
    ) -> None:
        self.id = response_id
        self.is_stored = is_stored
        self.size = size
        self.conversation = body.conversation
        self.status: Status = "queued" if body.background else "in_progress"
        self._body = body
        self._conversation: Conversation | None = None
        self._tokenizer = serving.engine.tokenizer
        adapter = serving.adapter_of(body.model)
        self._model = serving.model_name if adapter is None else adapter.name
        self._created = time.time()
        self._completed: float | None = None
        self._error: ResponseError | None = None
        self._incomplete: IncompleteDetails | None = None
        self._tokens: TokenTrail | None = None
        self.output = OutputItems(response_id.removeprefix(RESPONSE_ID), {})
        self._output_tokens = 0
        self._earlier = _NO_USAGE  # Usage of the turns before.
        if conversation is not None:
            self.next_turn(conversation, body.prompt_tools)

    def next_turn(self, conversation: Conversation, tools: Sequence[PromptTool]) -> None:
        """Begin a turn of the model. A response has several if the server runs its tools."""
        self._earlier = self._usage()
        self._conversation, self._output_tokens = conversation, 0
        if self._body.logprobs:
            self._tokens = TokenTrail(self._tokenizer, conversation.requests[0])
        self.output.next_turn(by_function_name(tools), self._tokens)

    def push(self, output: RequestOutput) -> Iterator[ResponseEvent]:
        """Yield the events of new output."""
        self.status = "in_progress"
        self._output_tokens = output.completion_tokens
        if self._tokens is not None:
            self._tokens.push(output.logprobs or ())
        assert self._conversation is not None
        for event in self._conversation.readers[0].push(output):
            yield from self.output.push(event)
        if output.finish_reason is not None:
            yield from self._end(output.finish_reason)

    def fail(self, error: ApiError) -> None:
        """End the response with an error."""
        self._finish("failed")
        self._error = ResponseError(
            "server_error" if error.status >= 500 else "invalid_prompt", error.message
        )

    def cancel(self) -> None:
        """End the response because a client cancelled it."""
        self._finish("cancelled")

    def as_answer(self) -> ResponseAnswer:
        """Return the response as the API shows it now."""
        body = self._body
        return ResponseAnswer(
            id=self.id,
            created_at=int(self._created),
            completed_at=None if self._completed is None else int(self._completed),
            status=self.status,
            background=body.background,
            conversation=(None if self.conversation is None else ConversationId(self.conversation)),
            error=self._error,
            incomplete_details=self._incomplete,
            instructions=body.instructions,
            frequency_penalty=body.frequency_penalty,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata,
            model=self._model,
            output=[copy(item) for item in self.output.items],
            parallel_tool_calls=body.parallel_tool_calls,
            presence_penalty=body.presence_penalty,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ResponseReasoning(body.reasoning.effort),
            safety_identifier=body.safety_identifier,
            store=self.is_stored,
            temperature=self._params.temperature if self._params else body.temperature,
            text=ResponseText(body.text.format.as_answer()),
            tool_choice=body.tool_choice.as_answer(),
            tools=[tool.as_answer() for tool in body.tools if not isinstance(tool, HostedTool)],
            top_logprobs=body.top_logprobs,
            top_p=self._params.top_p if self._params else body.top_p,
            truncation=body.truncation,
            usage=None if self.status in LIVE else self._usage(),
            user=body.user,
        )

    @property
    def output_tokens(self) -> int:
        """Number of tokens that the model has generated in all turns."""
        return self._earlier.output_tokens + self._output_tokens

    def finish(self) -> None:
        """End the response after its last turn."""
        self._finish("completed")

    def _end(self, reason: FinishReason) -> Iterator[ResponseEvent]:
        if reason != FinishReason.STOP:
            self.output.give_up()
        match reason:
            case FinishReason.LENGTH:
                self._incomplete = IncompleteDetails("max_output_tokens")
                yield from self.output.close("incomplete")
                self._finish("incomplete")
            case FinishReason.ABORT:
                yield from self.output.close("incomplete")
                self._finish("cancelled")
            case _:
                if not self.output.items:
                    yield from self.output.begin_message()
                yield from self.output.close()
                if not self.output.pending:
                    self._finish("completed")

    def _finish(self, status: Status) -> None:
        for _ in self.output.close("incomplete"):
            pass
        self.status = status
        self._completed = time.time() if status == "completed" else None

    def _usage(self) -> ResponseUsage:
        """Return `usage`. Writing to the cache is never charged."""
        before = self._earlier
        if self._conversation is None:
            return before
        (request,) = self._conversation.requests
        thoughts = self._conversation.reasoning_tokens(self._tokenizer)
        prompt = before.input_tokens + len(request.prompt_ids)
        cached = before.input_tokens_details.cached_tokens + (request.cached_tokens or 0)
        images = (before.input_tokens_details.image_tokens or 0) + request.image_tokens
        written = before.output_tokens + self._output_tokens
        return ResponseUsage(
            prompt,
            InputTokensDetails(cached, image_tokens=images or UNSET),
            written,
            OutputTokensDetails(before.output_tokens_details.reasoning_tokens + thoughts),
            prompt + written,
        )

    @property
    def _params(self) -> SamplingParams | None:
        """The sampling parameters of the last turn."""
        return None if self._conversation is None else self._conversation.requests[0].params
