"""What the endpoint of images answers, for `/openapi.json`."""

from __future__ import annotations

from ..core.answers import Answer


class GeneratedImage(Answer):
    """Either `b64_json` or `url`, as `response_format` asks for."""

    b64_json: str = ""
    url: str = ""
    seed: int


class Images(Answer):
    created: int
    data: list[GeneratedImage]
    size: str
    output_format: str
    warnings: list[str]
