"""llm-comply, which holds answers to the published specifications of three APIs."""

from __future__ import annotations

import json
import subprocess

import pytest
from client_programs import program, says

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", ["open-responses", "openai-chat", "anthropic"])
def test_all_but_images_is_as_specified(form: str) -> None:
    path = program("llm-comply")
    with says(("get_weather", {"location": "Bonn"}), text="Hello.", require_model=True) as url:
        command = [path, "run", "--json", "-u", f"{url}/v1", "-k", "none", "-m", "toy"]
        command += ["--format", form, "-H", "anthropic-version:2023-06-01"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    results = json.loads(done.stdout)["results"]
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert all("image" in name for name in failed), failed
    assert any(one["status"] == "passed" for one in results)
