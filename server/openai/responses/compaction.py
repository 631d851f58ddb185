"""`POST /v1/responses/compact`: a long conversation becomes its user's messages and a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, FailFast, Field
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, Answer, answers
from ...core.cache_hints import CacheHints
from ...core.limits import MAX_MESSAGES
from ...core.parameters import RESPONSES, Others
from ...core.schemas import ServiceTier
from ...http.body import JsonRequest, JsonRoute
from ...serving.collector import generate_all
from ...serving.state import ServingDep, json_response
from .chat import begin_within
from .endpoints import ResponsesDep, context_of
from .items import CompactionItem, ContextItem, InputItem, OutputMessage, input_message, item_id
from .live import LiveResponse
from .requests import Reasoning, ResponsesRequest, one_message
from .response import RESPONSE_ID, ResponseUsage, new_id
from .summary import pack_summary

router = APIRouter(route_class=JsonRoute)
_MAX_TOKENS = 2048  # Maximum number of tokens of a summary.
_ASK = (
    "Summarise this conversation for an assistant that will continue it. The assistant will see "
    "only this summary and the user's messages. Keep facts, decisions, names, code, results of "
    "tools and open tasks. Write the summary and nothing else."
)


class CompactRequest(CacheHints):
    """Body of `POST /v1/responses/compact`."""

    others: ClassVar[Others] = RESPONSES

    model: str
    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(one_message, json_schema_input_type=str | list[InputItem]),
        Field(max_length=MAX_MESSAGES),
    ] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    service_tier: ServiceTier | None = None


class CompactedResponse(Answer, kw_only=True):
    """`output` is the input of the next response: the user's messages, then the summary."""

    id: str
    created_at: int
    object: Literal["response.compaction"] = "response.compaction"
    output: Sequence[ContextItem]
    usage: ResponseUsage


@router.post("/v1/responses/compact", responses=answers(CompactedResponse, errors=BODY_ERRORS))
async def compact_response(
    body: CompactRequest, request: JsonRequest, serving: ServingDep, responses: ResponsesDep
) -> Response:
    """Let the model summarise a conversation. If it does not fit, its last turns are summarised."""
    response_id = new_id()
    asked = ResponsesRequest(
        model=body.model,
        input=[*body.input, InputItem.model_validate({"role": "user", "content": _ASK})],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        max_output_tokens=_MAX_TOKENS,
        truncation="auto",
        store=False,
        reasoning=Reasoning(effort="none"),
    )
    _, items = await context_of(asked, responses, response_id)
    conversation = await begin_within(serving, asked, items, response_id, size=request.size)
    answer = LiveResponse(
        serving, asked, response_id, conversation, is_stored=False, size=request.size
    )
    (output,) = await generate_all(serving, conversation.requests)
    for _ in answer.push(output):
        pass
    shown = answer.as_answer()
    assert shown.usage is not None
    texts = [
        part.text for item in shown.output if isinstance(item, OutputMessage)
        for part in item.content
    ]  # fmt: skip
    summary = CompactionItem(
        id=item_id("compaction", response_id.removeprefix(RESPONSE_ID), 0),
        encrypted_content=pack_summary("".join(texts).strip()),
    )
    said = [input_message(item) for item in items[:-1] if item.get("role") == "user"]
    return json_response(
        CompactedResponse(
            id=response_id, created_at=int(time.time()), output=[*said, summary], usage=shown.usage
        )
    )
