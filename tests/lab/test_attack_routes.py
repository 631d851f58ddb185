"""The fuzz campaign reaches every endpoint of every kind of server."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from fastapi import APIRouter
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartParser

from piecework.lab.attack.forms import FORM, FORM_PATHS, form
from piecework.lab.attack.fuzz_bodies import fuzz_request
from piecework.lab.attack.fuzz_seeds import GETS
from piecework.lab.attack.kinds import SEEDS
from piecework.server.app import TEXT_ROUTERS
from piecework.server.fleet_service import _OWN_ROUTERS
from piecework.server.http.form import FormRoute
from piecework.server.image_service import IMAGE_ROUTERS
from piecework.server.page import files as page_files
from piecework.server.pooling_service import POOLING_ROUTERS
from piecework.server.serving.state import Kind
from piecework.server.speech_service import SPEECH_ROUTERS

ROUTERS: list[tuple[Kind, Sequence[APIRouter]]] = [
    ("text", (*TEXT_ROUTERS, *_OWN_ROUTERS, page_files.router)),
    ("images", IMAGE_ROUTERS),
    ("pooling", POOLING_ROUTERS),
    ("speech", SPEECH_ROUTERS),
]


@pytest.mark.parametrize(("kind", "routers"), ROUTERS, ids=[kind for kind, _ in ROUTERS])
def test_every_route_is_reached(kind: Kind, routers: Sequence[APIRouter]) -> None:
    """An endpoint that is not here needs a body in `SEEDS` or a path in `GETS`."""
    posted, others = {*SEEDS[kind]}, {path.partition("?")[0] for path in (*GETS, *SEEDS[kind])}
    # These do the same for every kind of model.
    posted |= {path for path in SEEDS["text"] if path.startswith(("/ping", "/api/", "/v1/batches"))}
    missing = {
        f"{method} {route.path}"
        for router in routers
        for route in router.routes
        for method in route.methods
        if not any(map(route.path_regex.match, posted if method == "POST" else others))
    }
    assert not missing


def test_forms_are_sent_to_every_endpoint_with_a_form() -> None:
    routes = [route for _, routers in ROUTERS for router in routers for route in router.routes]
    forms = {
        route.path
        for route in routes
        if isinstance(route, FormRoute) or "multipart" in str(route.openapi_extra)
    }
    assert forms == FORM_PATHS


async def test_a_form_has_its_fields_and_its_file() -> None:
    async def parsed(content: bytes) -> FormData:
        async def stream():  # type: ignore[no-untyped-def]
            yield content

        return await MultiPartParser(Headers({"content-type": FORM}), stream()).parse()

    assert parse_options_header(FORM)[0] == b"multipart/form-data"
    read = await parsed(form({"file": "tone.wav", "a[]": ["x", 1], 'b"': True}))
    assert read.getlist("a[]") == ["x", "1"] and read['b"'] == "true"
    assert (await read["file"].read())[:4] == b"RIFF"
    made = [fuzz_request(SEEDS["speech"], 1, number) for number in range(300)]
    sent = [each for each in made if each.path in SEEDS["speech"] and each.body is not None]
    assert len(sent) > 200 and all(each.content_type == FORM for each in sent)
    read_back = 0
    for each in sent:
        try:
            json.loads(each.body or b"")
        except ValueError:
            read_back += b"RIFF" in (each.body or b"")
    assert read_back > 100
