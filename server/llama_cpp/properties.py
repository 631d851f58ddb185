"""`GET /props`, `GET /slots` and `POST /apply-template` of llama.cpp's server."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...runtime.tokenizer.tokenizer import Tokenizer
from ...version import __version__
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import Unavailable
from ..core.limits import check_text
from ..core.llama_cpp_errors import LlamaCppErrorAnswer
from ..http.body import JsonRequest, JsonRoute
from ..openai.conversation import chat_text
from ..serving.request_builder import WireNames, build_requests
from ..serving.state import DEFAULT_MODEL, ServingDep, json_response
from .answers import GenerationSettings, settings_of
from .prompts import sampling_of
from .requests import GenerationBody, TemplateBody

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_RETRY_SECONDS = 1


class DefaultSettings(Answer):
    """`n_ctx` is the context length of one request."""

    n_ctx: int
    params: GenerationSettings


class Modalities(Answer):
    vision: bool = False
    audio: bool = False


class Props(Answer, kw_only=True):
    """Properties of the server. `total_slots` is the number of requests that run at once."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class NextToken(Answer):
    """`n_remain` is the number of tokens that the limits leave."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(Answer, kw_only=True):
    """A place for a running request. The last three members are set while a request runs."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    next_token: NextToken | UnsetType = UNSET


class AppliedTemplate(Answer):
    prompt: str


@router.get("/props", responses=answers(Props, errors=(503,), error=LlamaCppErrorAnswer))
async def props(serving: ServingDep) -> Response:
    """Return the model, the chat template and the defaults of `/completion`."""
    serving.check_model(DEFAULT_MODEL)
    body, tokenizer, limits = GenerationBody(), serving.engine.tokenizer, serving.limits
    (request,) = build_requests(
        serving,
        await sampling_of(serving, body),
        [0],
        ["props"],
        names=WireNames("prompt", {}),
        max_tokens=limits.context_length,
        include_stop=False,
        priority=0,
        arrival_time=0.0,
        belongs_to=frozenset(),
        min_new_tokens=0,
    )
    ends = tokenizer.eos_token_ids
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(
                limits.context_length, settings_of(serving, body, request)
            ),
            total_slots=serving.info.max_running_requests,
            model_alias=serving.model_name,
            model_path=serving.config.engine.model_path,
            modalities=Modalities(vision=serving.media is not None),
            chat_template=tokenizer.chat_template or "",
            bos_token=_text(tokenizer, tokenizer.bos_token_id),
            eos_token=_text(tokenizer, ends[0] if ends else None),
            build_info=f"piecework-{__version__}",
        )
    )


@router.get("/slots", responses=answers(list[Slot], errors=(503,), error=LlamaCppErrorAnswer))
async def slots(
    serving: ServingDep,
    fail_on_no_slot: Annotated[str, Query(description="1: 503 if no slot is free")] = "",
) -> Response:
    """List the running requests, oldest first, then the free places.

    Nothing belongs to a place: requests move to other places when one ends.
    """
    total, context = serving.info.max_running_requests, serving.limits.context_length
    unfinished = serving.engine.unfinished()
    running = list(islice((each for each in unfinished if each.started is not None), total))
    if fail_on_no_slot == "1" and len(running) == total:
        raise Unavailable(
            f"All {total} slots are in use; try again in {_RETRY_SECONDS} s.",
            code="no_slot",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )
    speculative = serving.config.engine.speculative_algorithm != "none"
    rows = [
        Slot(id=number, n_ctx=context, speculative=speculative, is_processing=number < len(running))
        for number in range(total)
    ]
    for row, request in zip(rows, running, strict=False):
        decoded = len(request.output_ids)
        row.n_prompt_tokens = len(request.prompt_ids)
        row.n_prompt_tokens_cache = request.cached_tokens or 0
        row.next_token = NextToken(
            not request.finished, request.params.max_new_tokens - decoded, decoded
        )
    return json_response(rows)


@body_router.post(
    "/apply-template",
    responses=answers(AppliedTemplate, errors=BODY_ERRORS, error=LlamaCppErrorAnswer),
)
async def apply_template(body: TemplateBody, request: JsonRequest, serving: ServingDep) -> Response:
    """Return the text that the model's chat template makes of messages."""
    serving.check_model(body.model or DEFAULT_MODEL)
    text, _ = await chat_text(serving, body, size=request.size)
    check_text(len(text), "messages")
    return json_response(AppliedTemplate(text))


def _text(tokenizer: Tokenizer, token_id: int | None) -> str:
    """Return the text of a special token, or an empty text if the model has none."""
    return "" if token_id is None else tokenizer.backend.id_to_token(token_id) or ""
