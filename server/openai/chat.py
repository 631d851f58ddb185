"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.engine.messages import FinishReason
from ...runtime.parsing.tool_calls import ToolCallFormat
from ...runtime.tokenizer.chat_template import ChatTemplateError
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..answers import BODY_ERRORS, answers
from ..collector import Collector, generate_all
from ..errors import InvalidRequest
from ..http.body import JsonRequest, JsonRoute, check_structure
from ..limits import check_text
from ..sse import EventStream
from ..state import THREAD_FROM, Serving, ServingDep, json_response
from .answers import ChatCompletion, ChatCompletionChunk
from .chunks import ChunkWriter, head, usage_of
from .generation import best, generation_requests
from .logprobs import chat_logprobs
from .protocol import ChatCompletionRequest, ChatOptions
from .tools import Calls, ToolUse, chat_grammar, format_of, message_of, tool_use

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=ChatCompletionChunk, errors=BODY_ERRORS),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a conversation."""
    serving.check_model(body.model)
    serving.check_room(body.samples, "n")
    ids = await chat_ids(
        serving, body, size=request.size, add_special_tokens=body.add_special_tokens
    )
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    use = tool_use(serving, body)
    grammar = await chat_grammar(serving, body, use)
    requests = generation_requests(serving, body, request_id, [ids], grammar)
    tokenizer = serving.engine.tokenizer
    if body.stream:
        start = head(serving, request_id, "chat.completion.chunk")
        chunks = _ChatChunks(serving, start, requests, body, use)
        return EventStream(Collector(serving, requests), chunks, serving.metrics)
    outputs = await generate_all(serving, requests)
    choices = [
        _choice(tokenizer, body, index, output, use)
        for index, output in enumerate(best(outputs, body.samples, body.n))
    ]
    start = head(serving, request_id, "chat.completion")
    usage = usage_of(requests, body.samples, sum([one.completion_tokens for one in outputs]))
    return json_response({**start, "choices": choices, "usage": usage})


async def chat_ids(
    serving: Serving,
    options: ChatOptions,
    *,
    size: int,
    add_special_tokens: bool,
    counting: bool = False,
) -> list[int]:
    """The token ids of a conversation, by the model's chat template. Raises `InvalidRequest`.

    `size`: bytes of the body that it came in. `counting`: it may be longer than the context.
    """
    tokenizer = serving.engine.tokenizer
    if tokenizer.chat_template is None:
        message = (
            "This model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE."
        )
        raise InvalidRequest(message, param="messages", code="no_chat_template")
    render = partial(_render, tokenizer, options, format_of(serving))
    try:
        text = render() if size < THREAD_FROM else await serving.threads.run(render)
    except ChatTemplateError as error:
        message = f"The model's chat template does not take these messages: {error}"
        raise InvalidRequest(message, param="messages", code="chat_template_error") from None
    if counting:
        check_text(len(text), "messages")
    return await serving.encode(
        text, add_special_tokens=add_special_tokens, param=None if counting else "messages"
    )


def _render(tokenizer: Tokenizer, options: ChatOptions, form: ToolCallFormat) -> str:
    """The prompt. Raises `InvalidRequest` where the template leaves tool calls out, and
    `ChatTemplateError`.
    """
    calls = [call for message in options.messages for call in message.tool_calls]
    arguments = [call.function.arguments for call in calls]
    check_structure("".join([part for part in arguments if isinstance(part, str)]).encode())
    messages = [message.for_template() for message in options.messages]
    tools = options.told
    apply = partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        template_kwargs=options.chat_template_kwargs,
    )
    untold = _untold_calls(messages, apply) if calls else None
    if not form.in_template and (tools or untold is not None):
        return apply(form.told(messages, tools))
    if untold is not None:
        param = f"messages[{untold}].tool_calls"
        message = (
            f"{param}: the model's chat template leaves tool calls out, so the model would not "
            "see them; put them into content."
        )
        raise InvalidRequest(message, param=param, code="unsupported_by_chat_template")
    return apply(messages, tools=[tool.described() for tool in tools])


def _untold_calls(
    messages: list[dict[str, Any]], apply: Callable[[list[dict[str, Any]]], str]
) -> int | None:
    """The first message of which a call does not show in the prompt, by a name that occurs nowhere
    else: templates pass over what they do not know.
    """
    places = {
        uuid.uuid4().hex: (index, call)
        for index, message in enumerate(messages)
        for call in message.get("tool_calls", ())
    }
    marked = [{**message} for message in messages]
    for index in {index for index, _ in places.values()}:
        marked[index]["tool_calls"] = []
    for mark, (index, call) in places.items():
        marked[index]["tool_calls"].append({**call, "function": {**call["function"], "name": mark}})
    text = apply(marked)
    return next((index for mark, (index, _) in places.items() if mark not in text), None)


def _choice(
    tokenizer: Tokenizer,
    body: ChatCompletionRequest,
    index: int,
    output: RequestOutput,
    use: ToolUse | None,
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    reason: str | None = output.finish_reason
    if use is not None:
        calls = Calls(use.parser())
        message = message_of(calls.push(output.text, ends=True))
        reason = _reason(output, calls)
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(tokenizer, output.logprobs or []) if body.logprobs else None,
        "finish_reason": reason,
    }


def _reason(output: RequestOutput, calls: Calls | None) -> str | None:
    if calls is not None and calls.any and output.finish_reason == FinishReason.STOP:
        return "tool_calls"
    return output.finish_reason


class _ChatChunks(ChunkWriter):
    """Chunks of a streamed chat completion: for each choice one with the role, those with text and
    calls, one with the finish reason.
    """

    def __init__(
        self,
        serving: Serving,
        start: dict[str, Any],
        requests: Sequence[RequestState],
        body: ChatCompletionRequest,
        use: ToolUse | None,
    ) -> None:
        super().__init__(serving, start, requests, body, is_plain=use is None)
        self._calls = [] if use is None else [Calls(use.parser()) for _ in requests]

    def opening(self, index: int) -> dict[str, Any]:
        return _delta(index, {"role": "assistant", "content": ""})

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        calls = self._calls[index] if self._calls else None
        if calls is None:
            deltas = [{"content": output.text}] if output.text or output.logprobs else []
        else:
            deltas = calls.push(output.text, ends=output.finish_reason is not None)
            deltas = deltas or [{"content": ""}] * bool(output.logprobs)
        choices = [_delta(index, delta) for delta in deltas]
        if output.logprobs:
            choices[0]["logprobs"] = chat_logprobs(self._tokenizer, output.logprobs)
        if output.finish_reason is not None:
            choices.append({**_delta(index, {}), "finish_reason": _reason(output, calls)})
        return choices


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
