"""A server of a .gguf model finds the vision tower beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_stand_in import data_url
from mmproj_files import write_files
from server_process import ready
from tiny_vision import make_tiny_vision, picture_file


@pytest.mark.slow
def test_a_chat_with_an_image_is_answered(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "folder")
    model = write_files(folder, "idefics3", tmp_path)
    part = {"type": "image_url", "image_url": {"url": data_url(picture_file())}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    with ready(str(model), "--tokenizer-path", str(folder)) as server:
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
