"""One response while it is generated: its state and its answer at every moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import copy

from ....runtime.core.generation import FinishReason
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
from .tools import HostedTool, by_function_name


class LiveResponse:
    """A response.

    Attributes:
        status: One of OpenAI's states.
        is_stored: Whether the response can be retrieved by its id.
        size: Size of the request in bytes.
        conversation: Id of the conversation to which the response's items are added.
    """

    def __init__(
        self,
        serving: Serving,
        body: ResponsesRequest,
        response_id: str,
        conversation: Conversation,
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
        self._conversation = conversation
        self._params = conversation.requests[0].params
        self._tokenizer = serving.engine.tokenizer
        self._model = serving.model_name
        self._created = time.time()
        self._completed: float | None = None
        self._error: ResponseError | None = None
        self._incomplete: IncompleteDetails | None = None
        self._tokens = (
            TokenTrail(self._tokenizer, conversation.requests[0]) if body.logprobs else None
        )
        key = response_id.removeprefix(RESPONSE_ID)
        self._output = OutputItems(key, by_function_name(body.prompt_tools), self._tokens)
        self._output_tokens = 0

    def push(self, output: RequestOutput) -> Iterator[ResponseEvent]:
        """Yield the events of new output."""
        self.status = "in_progress"
        self._output_tokens = output.completion_tokens
        if self._tokens is not None:
            self._tokens.push(output.logprobs or ())
        for event in self._conversation.readers[0].push(output):
            yield from self._output.push(event)
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
            output=[copy(item) for item in self._output.items],
            parallel_tool_calls=body.parallel_tool_calls,
            presence_penalty=body.presence_penalty,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ResponseReasoning(body.reasoning.effort),
            safety_identifier=body.safety_identifier,
            store=self.is_stored,
            temperature=self._params.temperature,
            text=ResponseText(body.text.format.as_answer()),
            tool_choice=body.tool_choice.as_answer(),
            tools=[tool.as_answer() for tool in body.tools if not isinstance(tool, HostedTool)],
            top_logprobs=body.top_logprobs,
            top_p=self._params.top_p,
            truncation=body.truncation,
            usage=None if self.status in LIVE else self._usage(),
            user=body.user,
        )

    def _end(self, reason: FinishReason) -> Iterator[ResponseEvent]:
        match reason:
            case FinishReason.LENGTH:
                self._incomplete = IncompleteDetails("max_output_tokens")
                yield from self._output.close("incomplete")
                self._finish("incomplete")
            case FinishReason.ABORT:
                yield from self._output.close("incomplete")
                self._finish("cancelled")
            case _:
                if not self._output.items:
                    yield from self._output.begin_message()
                yield from self._output.close()
                self._finish("completed")

    def _finish(self, status: Status) -> None:
        for _ in self._output.close("incomplete"):
            pass
        self.status = status
        self._completed = time.time() if status == "completed" else None

    def _usage(self) -> ResponseUsage:
        """Return `usage`. Writing to the cache is never charged."""
        (request,) = self._conversation.requests
        prompt, thoughts = (
            len(request.prompt_ids),
            self._conversation.reasoning_tokens(self._tokenizer),
        )
        return ResponseUsage(
            prompt,
            InputTokensDetails(request.cached_tokens or 0),
            self._output_tokens,
            OutputTokensDetails(thoughts),
            prompt + self._output_tokens,
        )
