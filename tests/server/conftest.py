"""Fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from http_fixtures import client_of, make_app, serve
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer())


@pytest.fixture
async def client(scripted: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in process."""
    async with client_of(make_app(scripted)) as client:
        yield client


@pytest.fixture
def url(scripted: ScriptedEngine) -> Iterator[str]:
    """The application behind a real server."""
    with serve(make_app(scripted)) as url:
        yield url
