"""A real server of two replicas with a tiny model of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from image_stand_in import data_url
from server_process import ready
from tiny_vision import make_tiny_vision, picture_file

CHAT = "/v1/chat/completions"


@pytest.mark.slow
def test_two_replicas_answer_images_and_find_them_again(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "tiny")
    bodies: list[dict[str, Any]] = []
    for seed in range(4):
        image = {"type": "image_url", "image_url": {"url": data_url(picture_file(seed=seed))}}
        message = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
        bodies.append({"messages": [message], "max_tokens": 6, "temperature": 0})
    with ready(str(folder)) as server:
        wanted = [server.client.post(CHAT, json=body).json() for body in bodies]
    with ready(str(folder), "--dp-size", "2") as server:
        for is_again in (False, True):
            for body, expected in zip(bodies, wanted, strict=True):
                answer = server.client.post(CHAT, json=body).json()
                message = answer["choices"][0]["message"]["content"]
                assert message == expected["choices"][0]["message"]["content"]
                details = answer["usage"]["prompt_tokens_details"]
                assert not is_again or details["cached_tokens"] > details["image_tokens"]
        metrics = server.client.get("/metrics").text
        # Each image once: a request goes where its prefix is.
        found = re.findall(r"^piecework:num_encoded_images_total\{.*\} (\S+)$", metrics, re.M)
        assert sum(map(float, found)) == 4
