"""A real server with a tiny model of images: answers, and what strangers may send."""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from image_stand_in import data_url
from PIL import Image
from server_process import ServerProcess, ready, serve
from tiny_vision import make_tiny_vision, picture_file

CHAT = "/v1/chat/completions"
_MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_vision(tmp_path_factory.mktemp("vision") / "tiny")
    with ready(str(folder), "--limit-mm-per-prompt", "image=2") as server:
        yield server


def asked(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}


def answer_of(server: ServerProcess, *files: bytes) -> tuple[str, dict[str, Any]]:
    body = asked(*map(data_url, files), temperature=0)
    # A busy machine takes long to start a decoder.
    answer = server.client.post(CHAT, json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["message"]["content"], told["usage"]


def decoders(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if any("preprocess_process" in part for part in one.cmdline())]


def test_the_client_of_openai_gets_the_same_answer_again_from_the_cache(
    server: ServerProcess,
) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    body = asked(data_url(picture_file(90, 60)), model="tiny", temperature=0)
    first, again = (client.chat.completions.create(**body) for _ in range(2))
    details = first.usage.prompt_tokens_details
    assert 0 < details.image_tokens < first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens > details.image_tokens
    assert first.choices[0].message.content == again.choices[0].message.content
    card = server.client.get("/v1/models").json()["data"][0]
    assert card["input_modalities"] == ["text", "image"] and card["image_tokens_1024"] > 0


@pytest.mark.slow
def test_a_folder_of_which_no_image_can_be_made_ends_the_server(tmp_path: Path) -> None:
    """The process that reads images finds it, in a trial."""
    folder = make_tiny_vision(tmp_path)
    file = folder / "preprocessor_config.json"
    kind = {"image_processor_type": "NoSuchProcessor"}
    file.write_text(json.dumps(json.loads(file.read_text()) | kind))
    with serve(str(folder)) as server:
        code, _, said = server.finish(180)
    assert code == 2, said
    *_, line = said.splitlines()
    assert line.startswith("piecework serve: error: the image processor of"), said
    assert str(folder) in line and "cannot be loaded" in line and "add --disable-vision" in line


def test_another_picture_has_another_prefix(server: ServerProcess) -> None:
    _, usage = answer_of(server, picture_file(seed=5), picture_file(seed=6))
    _, other = answer_of(server, picture_file(seed=7), picture_file(seed=6))
    shared = other["prompt_tokens_details"]["cached_tokens"]
    assert shared < usage["prompt_tokens"] - usage["prompt_tokens_details"]["image_tokens"]


@pytest.mark.slow
def test_a_killed_engine_costs_a_request_with_images_nothing_but_time(
    server: ServerProcess,
) -> None:
    long = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    body = asked(data_url(picture_file(seed=11)), **long)
    known = server.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.client.post(CHAT, json=body, timeout=120))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.1)
    server.engine().kill()
    asking.join(120)
    (answer,) = answers
    assert answer.json()["choices"][0]["message"]["content"] == known


def test_images_go_with_several_answers_a_grammar_and_tools(server: ServerProcess) -> None:
    image = data_url(picture_file(seed=12))
    several = server.client.post(CHAT, json=asked(image, n=3, regex="(yes|no)", max_tokens=8))
    assert several.status_code == 200, several.text
    texts = [each["message"]["content"] for each in several.json()["choices"]]
    assert len(texts) == 3 and set(texts) <= {"yes", "no"}
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    call = server.client.post(
        CHAT, json=asked(image, tools=[tool], tool_choice="required", max_tokens=200)
    )
    assert call.status_code == 200, call.text
    message = call.json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "look"
    # The answer goes back, with an image as the tool's result.
    turns = [
        *asked(image)["messages"],
        message,
        {
            "role": "tool",
            "tool_call_id": message["tool_calls"][0]["id"],
            "content": [{"type": "image_url", "image_url": {"url": image}}],
        },
    ]
    answer = server.client.post(CHAT, json={"messages": turns, "max_tokens": 4, "tools": [tool]})
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_the_death_of_a_decoder_costs_nothing_but_time(server: ServerProcess) -> None:
    known = answer_of(server, picture_file(seed=9))
    for decoder in decoders(server):
        decoder.kill()
        decoder.wait(10)
    assert answer_of(server, picture_file(seed=9))[0] == known[0]


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def _huge_png(side: int = 60_000) -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few kilobytes."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * side + 1) * 20)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    )


def _animated_bomb() -> bytes:
    """A GIF whose 400 frames have 1.6 GB of pixels."""
    frames = [Image.new("P", (2000, 2000), number % 2) for number in range(2)]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:] * 200)
    return file.getvalue()


def _attacks() -> dict[str, str | bytes]:
    large = base64.b64encode(bytes(17 * _MIB)).decode()
    return {
        "truncated": data_url(picture_file(600, 400)[:900]),
        "60,000 x 60,000": data_url(_huge_png()),
        "svg": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        "metadata": "http://169.254.169.254/latest/meta-data",
        "loopback": "http://127.0.0.1:1/a.png",
        "file": "file:///etc/passwd",
        "not an image": data_url(bytes(_MIB)),
        "a png of noise": data_url(b"\x89PNG\r\n\x1a\n" + bytes(_MIB)),
        "large": f"data:image/png;base64,{large}",
    }


class Health(threading.Thread):
    """Asks /health all the time. `longest` is the most time in seconds that the server's front
    process computed until it answered, which does not depend on other programs.
    """

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._client = httpx.Client(base_url=server.url, timeout=60)
        self._front, self._ended = psutil.Process(server.process.pid), threading.Event()
        self.longest, self.answers, self.failures = 0.0, 0, 0

    def run(self) -> None:
        while not self._ended.wait(0.05):
            began = sum(self._front.cpu_times()[:2])
            try:
                is_well = self._client.get("/health").status_code == 200
            except httpx.HTTPError:
                is_well = False
            self.answers += is_well
            self.failures += not is_well
            self.longest = max(self.longest, sum(self._front.cpu_times()[:2]) - began)

    def __enter__(self) -> Health:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self.join()


def _memory(server: ServerProcess) -> int:
    tree = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (tree, *tree.children(recursive=True)))


def test_attacks_are_refused_in_bounded_memory_while_the_server_is_well(
    server: ServerProcess,
) -> None:
    answer_of(server, picture_file())
    before = most = _memory(server)
    with Health(server) as health:
        for name, url in _attacks().items():
            answer = server.client.post(CHAT, json=asked(str(url)))
            assert answer.status_code in (400, 413), (name, answer.text[:200])
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"] == "messages[0].content[1].image_url", (name, error)
            most = max(most, _memory(server))
        # A bomb is an ordinary image: only its first frame is read.
        bomb = server.client.post(CHAT, json=asked(data_url(_animated_bomb())))
        assert bomb.status_code == 200, bomb.text
        content = b'{"messages": "' + b"A" * (40 * _MIB) + b'"}'
        header = {"Content-Type": "application/json"}
        large = server.client.post(CHAT, content=content, headers=header)
        assert large.status_code == 413
        most = max(most, _memory(server))
        three = server.client.post(CHAT, json=asked(*[data_url(picture_file())] * 3))
        assert three.json()["error"]["code"] == "too_many_images"
    assert health.failures == 0 and health.answers > 5
    assert health.longest < 2.0
    assert most - before < 300 * _MIB, (before, most)
