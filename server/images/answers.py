"""The answers of the image endpoint, for `/openapi.json`."""

from __future__ import annotations

from ..core.answers import Answer


class GeneratedImage(Answer):
    """One image. `response_format` decides whether `b64_json` or `url` is set."""

    b64_json: str = ""
    url: str = ""
    seed: int


class Images(Answer):
    created: int
    data: list[GeneratedImage]
    size: str
    output_format: str
    warnings: list[str]
