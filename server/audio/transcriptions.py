"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..core.answers import answers
from ..core.errors import InvalidRequest
from ..http.form import FormRoute, file_of, form_schema
from ..serving.collector import unless_client_goes
from ..serving.state import json_response
from .formats import (
    Placed,
    TextDelta,
    TextDone,
    Transcription,
    VerboseTranscription,
    segments_of,
    srt,
    text_of,
    usage_of,
    vtt,
    words_of,
)
from .requests import AudioForm, TranscriptionForm, read_form
from .state import SpeechServing, SpeechServingDep
from .stream import TranscriptStream
from .transcript import Wanted, Written, write_file

router = APIRouter(route_class=FormRoute)
_ERRORS = (400, 404, 413, 415, 500, 503)
_TEXTS = ("text/plain", "text/vtt", "application/x-subrip")
_FILE = {"type": "string", "format": "binary"}


def _declared(kind: type[AudioForm]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with a form of this kind."""
    members = kind.model_json_schema()["properties"]
    lists = {name for name, member in members.items() if "array" in str(member)}
    named = {f"{name}[]" if name in lists else name: member for name, member in members.items()}
    return form_schema({"file": _FILE, **named}, ("file",))


@router.post(
    "/v1/audio/transcriptions",
    responses=answers(
        Transcription | VerboseTranscription,
        stream=TextDelta | TextDone,
        media=_TEXTS,
        errors=_ERRORS,
    ),
    openapi_extra=_declared(TranscriptionForm),
)
async def create_transcription(request: Request, serving: SpeechServingDep) -> Response:
    """Write the text of a file of audio."""
    async with AsyncExitStack() as stack:
        form = await stack.enter_async_context(serving.uploads.form(request, FormRoute.most))
        body: TranscriptionForm = read_form(TranscriptionForm, form)
        serving.check_model(body.model)
        language = serving.language_code(body.language)
        wanted = Wanted("transcribe", language, body.words, body)
        serving.check_room()
        written = write_file(serving, file_of(form), wanted)
        if body.stream:
            return TranscriptStream(written, serving, stack.pop_all())
        return await unless_client_goes(request.receive, _answer(serving, written, wanted))


@router.post(
    "/v1/audio/translations",
    responses=answers(Transcription | VerboseTranscription, media=_TEXTS, errors=_ERRORS),
    openapi_extra=_declared(AudioForm),
)
async def create_translation(request: Request, serving: SpeechServingDep) -> Response:
    """Write the English text of a file of audio in another language."""
    async with serving.uploads.form(request, FormRoute.most) as form:
        body: AudioForm = read_form(AudioForm, form)
        serving.check_model(body.model)
        if not serving.info.languages:
            raise InvalidRequest(
                "This model knows only English; send the file to /v1/audio/transcriptions, or "
                "serve a model of several languages.",
                code="not_multilingual",
            )
        wanted = Wanted("translate", None, False, body)
        serving.check_room()
        written = write_file(serving, file_of(form), wanted)
        return await unless_client_goes(request.receive, _answer(serving, written, wanted))


async def _answer(
    serving: SpeechServing, written: AsyncGenerator[Written], wanted: Wanted
) -> Response:
    """Return the whole text in the wanted format."""
    placed: list[Placed] = []
    language, seconds = "", 0.0
    with serving.measured():
        async with aclosing(written):
            async for part in written:
                placed += part.segments
                language, seconds = language or part.language, part.seconds
    text, usage = text_of(placed), usage_of(seconds)
    match wanted.form.response_format:
        case "json":
            return json_response(Transcription(text=text, usage=usage))
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt":
            return PlainTextResponse(srt(placed), media_type="application/x-subrip")
        case "vtt":
            return PlainTextResponse(vtt(placed), media_type="text/vtt")
        case "verbose_json":
            form = wanted.form
            given = getattr(form, "timestamp_granularities", ["segment"])
            return json_response(
                VerboseTranscription(
                    task=wanted.task,
                    language=serving.info.languages.get(language, "english"),
                    duration=round(seconds, 2),
                    text=text,
                    segments=segments_of(placed) if "segment" in given else UNSET,
                    words=words_of(placed) if wanted.words else UNSET,
                    usage=usage,
                )
            )
