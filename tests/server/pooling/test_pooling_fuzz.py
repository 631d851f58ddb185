"""Whatever JSON a client sends is answered or refused, and the server goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pooling_here import client_here, load
from tiny_encoders import make_tiny_encoder

from piecework.server.http.body import JsonRoute
from piecework.server.pooling_service import POOLING_ROUTERS

WORDS = st.sampled_from(["a", "fox dog", "", "[SEP]", "\x00", "ü" * 40, "fox " * 40])
LEAVES = WORDS | st.integers(-2, 70) | st.none() | st.booleans() | st.floats(-9, 9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["text", "query", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
TEXTS = WORDS | st.lists(WORDS, max_size=4)
NAMES = (
    *("input", "query", "documents", "text_1", "text_2", "queries", "top_n", "dimensions"),
    *("encoding_format", "truncate_prompt_tokens", "return_documents", "model", "user"),
    *("prompt", "truncate", "options", "keep_alive"),
)
BODIES = st.builds(
    dict.__or__,
    st.sampled_from([{}, {"model": "tiny"}]),
    st.dictionaries(st.sampled_from(NAMES), TEXTS | VALUES, max_size=5),
)
PATHS = st.sampled_from(
    [
        route.path
        for router in POOLING_ROUTERS
        for route in router.routes
        if isinstance(route, JsonRoute)
    ]
)


Ask = Callable[[list[tuple[str, dict[str, Any]]]], set[int]]


@pytest.fixture(scope="module", params=[False, True], ids=["embedder", "reranker"])
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Sends requests at once; the statuses of their answers."""
    folder = tmp_path_factory.mktemp("fuzzed")
    model = load(make_tiny_encoder(folder, "bert", classifier=request.param), context_length=32)
    with asyncio.Runner() as runner:
        client, engine = client_here(model)

        async def send(requests: list[tuple[str, dict[str, Any]]]) -> set[int]:
            posts = (client.post(path, json=body) for path, body in requests)
            answers = await asyncio.gather(*posts)
            assert engine.scheduler.stats().running_requests == 0
            return {answer.status_code for answer in answers}

        yield lambda requests: runner.run(send(requests))


@settings(max_examples=examples(25, exploring=60))
@given(st.lists(st.tuples(PATHS, BODIES), min_size=1, max_size=3))
def test_any_body_is_answered_or_refused(
    ask: Ask, requests: list[tuple[str, dict[str, Any]]]
) -> None:
    assert ask(requests) <= {200, 400, 404}
