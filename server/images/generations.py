"""`POST /v1/images/generations`, and the files behind the URLs of its answers."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.core.generation import FinishReason
from ...runtime.core.image_params import DiffusionParams, InvalidParams
from ...runtime.core.messages import GenerateImage, ImageOutput
from ...runtime.diffusion.media import encode_image
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InternalError, InvalidRequest, NotFound
from ..core.open_paths import OPEN_FOLDER
from ..engine.state import EngineUnavailable
from ..http.body import JsonRoute
from ..serving.state import json_response
from .requests import ImagesRequest
from .state import ImageServing, ImageServingDep

router = APIRouter(route_class=JsonRoute)
file_router = APIRouter()
FILE_TYPES = ("image/png", "image/jpeg", "image/webp")
_SEED_BITS = 31  # Size of random seeds, so that every client can send them back.


class GeneratedImage(Answer, kw_only=True):
    """One image. `response_format` decides whether `b64_json` or `url` is set."""

    b64_json: str | UnsetType = UNSET
    url: str | UnsetType = UNSET
    seed: int


class Images(Answer):
    created: int
    data: list[GeneratedImage]
    size: str
    output_format: str
    warnings: list[str]


@router.post("/v1/images/generations", responses=answers(Images, errors=BODY_ERRORS))
async def create_images(
    body: ImagesRequest, request: Request, serving: ImageServingDep
) -> Response:
    """Generate one or more images from a prompt."""
    serving.check_model(body.model)
    requests = image_requests(body, f"img-{uuid.uuid4().hex}")
    made = await _make_all(serving, body, requests)
    outputs = [output for output, _ in made]
    ignored = [f"{name} was ignored: the pipeline has no such setting" for name in body.ignored]
    return json_response(
        Images(
            created=int(time.time()),
            data=[
                _image(serving, body, str(request.base_url), asked.params.seed, file)
                for asked, (_, file) in zip(requests, made, strict=True)
            ],
            size=f"{outputs[0].width}x{outputs[0].height}",
            output_format=body.output_format,
            warnings=list(
                dict.fromkeys(
                    [*ignored, *(warning for output in outputs for warning in output.warnings)]
                )
            ),
        )
    )


FILE_ROUTE: dict[str, Any] = {
    "path": OPEN_FOLDER + "{name}",
    "response_class": Response,
    "responses": answers(media=FILE_TYPES, errors=(404,)),
}


@file_router.get(**FILE_ROUTE)
async def get_file(name: str, serving: ImageServingDep) -> Response:
    """Return an image by its URL until it expires. Needs no key: its name cannot be guessed."""
    stored = serving.store.get(name)
    if stored is None:
        raise NotFound(
            "There is no such image, or it has expired; ask for it anew, or as b64_json.",
            code="image_not_found",
        )
    return Response(
        stored.content, media_type=stored.media_type, headers={"X-Content-Type-Options": "nosniff"}
    )


def image_requests(body: ImagesRequest, request_id: str) -> list[GenerateImage]:
    """Return a request for each of the `n` images. Raises `InvalidRequest`."""
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    width, height = (body.width, body.height) if "size" not in body.model_fields_set else body.size
    try:
        return [
            GenerateImage(
                rid=f"{request_id}-{number}",
                params=DiffusionParams(
                    prompt=body.prompt,
                    negative_prompt=body.negative_prompt,
                    width=width,
                    height=height,
                    num_frames=body.num_frames,
                    num_inference_steps=body.num_inference_steps,
                    guidance_scale=body.guidance_scale,
                    guidance_scale_2=body.guidance_scale_2,
                    seed=seed + number,
                    group=request_id,
                ),
            )
            for number in range(body.n)
        ]
    except InvalidParams as error:
        raise _refused(body, str(error), error.param, "invalid_value") from None


async def _make_all(
    serving: ImageServing, body: ImagesRequest, requests: Sequence[GenerateImage]
) -> list[tuple[ImageOutput, bytes]]:
    """Generate all images and their files. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(_make(serving, body, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _make(
    serving: ImageServing, body: ImagesRequest, request: GenerateImage
) -> tuple[ImageOutput, bytes]:
    metrics, start = serving.metrics, time.monotonic()
    try:
        output = await serving.engine.generate(request)
        match output.finish_reason:
            case FinishReason.ABORT:
                raise EngineUnavailable("the server is stopping")
            case FinishReason.ERROR if output.code is not None:
                raise _refused(body, output.error or "", output.param, output.code)
            case FinishReason.ERROR:
                raise InternalError(
                    f"The engine could not finish the request: {output.error}.", code="engine_error"
                )
        # Run in a thread, because compression would delay other requests.
        file = await asyncio.to_thread(
            encode_image,
            output.pixels,
            output.width,
            output.height,
            body.output_format,
            body.output_compression,
        )
        metrics.end_to_end.observe(time.monotonic() - start)
        return output, file
    except asyncio.CancelledError:
        metrics.aborted.value += 1
        raise
    finally:
        metrics.requests.value += 1


def _image(
    serving: ImageServing, body: ImagesRequest, base_url: str, seed: int, file: bytes
) -> GeneratedImage:
    if body.response_format == "b64_json":
        return GeneratedImage(b64_json=base64.b64encode(file).decode(), seed=seed)
    try:
        name = serving.store.put(file, body.output_format, f"image/{body.output_format}")
    except ValueError as error:
        message = (
            f"response_format: {error}; ask for b64_json, or start the server with a larger "
            "--image-url-memory."
        )
        raise InvalidRequest(message, param="response_format", code="image_too_large") from None
    return GeneratedImage(url=f"{base_url.rstrip('/')}{OPEN_FOLDER}{name}", seed=seed)


def _refused(body: ImagesRequest, message: str, param: str | None, code: str) -> InvalidRequest:
    """Return an error with the wire name of the parameter."""
    if param in ("width", "height", "size") and "size" in body.model_fields_set:
        return InvalidRequest(f"size: {message}.", param="size", code=code)
    return InvalidRequest(f"{message}.", param=param, code=code)
