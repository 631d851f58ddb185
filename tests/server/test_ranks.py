"""A server of two ranks answers as one process does, and tells what each rank holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_stand_in import data_url
from raw_http import connect, post
from server_process import ServerProcess, ready
from tiny_vision import make_slow_vision, picture_file

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.runtime.sampling import grammar

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 10]
LENGTH = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slow_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", max_total_tokens=2048, num_threads=1)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[ServerProcess]:
    with ready(str(path), "--tp-size", "2") as server:
        yield server


def test_its_answers_are_those_of_one_process(server: ServerProcess, alone: LLM) -> None:
    """The second time from the prefix cache, and then without it."""
    params = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True, logprobs=2)
    expected = alone.generate(PROMPTS, params)
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": sampling, "return_logprob": True}
    for _ in range(3):
        answers = server.client.post("/generate", json=body).json()
        assert [answer["output_ids"] for answer in answers] == [
            completion.token_ids for completion in expected
        ]
        for answer, completion in zip(answers, expected, strict=True):
            said = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
            wanted = [entry.logprob for entry in completion.logprobs]
            assert said == pytest.approx(wanted, abs=1e-4)
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert max(cached) > 0
    assert server.client.post("/flush_cache").json()["freed_tokens"] > 0
    again = server.client.post("/generate", json=body).json()
    assert [answer["meta_info"]["cached_tokens"] for answer in again] == [0, 0]


def test_a_grammar_holds_on_every_rank(server: ServerProcess, alone: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_new_tokens=LENGTH, grammar=grammar.from_regex("[0-9]{4}-[a-f]+")
    )
    (expected,) = alone.generate([PROMPTS[0]], params)
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "regex": "[0-9]{4}-[a-f]+"}
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling}
    assert server.client.post("/generate", json=body).json()["output_ids"] == expected.token_ids


def test_an_aborted_request_ends_on_every_rank(server: ServerProcess) -> None:
    """What begins behind it runs in the same steps on all."""
    with server.stream():
        pass
    sampling = {"temperature": 0, "max_new_tokens": 4}
    body = {"input_ids": PROMPTS[1], "sampling_params": sampling}
    assert len(server.client.post("/generate", json=body).json()["output_ids"]) <= 4


def image(width: int, height: int, seed: int) -> dict[str, Any]:
    url = data_url(picture_file(width, height, seed=seed))
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


TEXT = {"type": "text", "text": "What is it?"}
FIRST, SECOND = image(48, 40, 0), image(30, 90, 1)
LARGE = image(240, 240, 2)
CHATS = [
    [user(FIRST, TEXT)],
    [user(SECOND, TEXT, FIRST)],
    [user(TEXT), {"role": "assistant", "content": "Hello"}, user(SECOND, TEXT)],
    [user(TEXT, LARGE)],
]


def encoder(server: ServerProcess) -> tuple[int, float]:
    """The number of encoded images, and the seconds that the encoder has taken."""
    (stats,) = server.client.get("/server_info").json()["internal_states"]
    return stats["encoded_images_total"], stats["encoder_seconds_total"]


def test_images_are_answered_as_by_one_process(server: ServerProcess, alone: LLM) -> None:
    """Alone, with others, in a later turn, and after one that was aborted in the encoder."""
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=0)
    expected = [alone.chat(messages, params) for messages in CHATS]
    before, seconds = encoder(server)
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": True}
    body = {"messages": [user(image(240, 240, 3), TEXT)], **sampling}
    with connect(server.port) as connection:
        connection.sendall(post("/v1/chat/completions", json.dumps(body).encode()))
        end = time.monotonic() + 30
        while encoder(server)[1] == seconds:
            assert time.monotonic() < end, "nothing is encoded"
            time.sleep(0.01)
    for messages, completion in zip(CHATS, expected, strict=True):
        body = {"messages": messages, **sampling}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        said = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
        assert said == pytest.approx([entry.logprob for entry in completion.logprobs], abs=1e-4)
    # FIRST, SECOND and LARGE. The aborted image was not finished.
    assert encoder(server)[0] == before + 3


def test_it_tells_what_each_rank_holds(server: ServerProcess, alone: LLM) -> None:
    told = server.client.get("/server_info").json()
    assert told["tp_size"] == len(told["ranks"]) == 2
    for rank in told["ranks"]:
        assert rank["kv_bytes"] < 0.55 * alone.info.kv_bytes
        assert rank["weight_bytes"] < 0.8 * alone.info.weight_bytes
    metrics = server.client.get("/metrics").text
    assert 'piecework:weight_memory_bytes{model_name="tiny",tp_rank="1"}' in metrics
    assert 'piecework:kv_memory_bytes{model_name="tiny",tp_rank="0"}' in metrics
