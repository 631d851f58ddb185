"""Prefixes that a client wants kept, in a whole engine: for every kind of cache, and for a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from tests.runtime.models.variants import LLAMAS, OTHERS
from tests.runtime.text_engines import Engine, prompt_of


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_kept_prompt_is_found_until_its_time_is_over(name: str, tmp_path: Path) -> None:
    architecture, overrides = {**LLAMAS, **OTHERS}[name]
    engine = Engine(make_tiny_model(tmp_path, architecture, **overrides), None)
    kept, other = prompt_of(1), prompt_of(2)
    expected, found = engine.ask(kept, keep=[(120, 300.0)], arrival_time=1000.0)
    engine.ask(other, arrival_time=1000.0)
    assert found == 0

    def traffic(seconds: float) -> None:
        seed = int(seconds)
        for number in range(10):
            engine.ask(prompt_of(seed + number), arrival_time=1000.0 + seconds)

    traffic(200)
    again, found = engine.ask(kept, arrival_time=1210.0)
    assert (again, found) == (expected, 112)
    assert engine.ask(other, arrival_time=1210.0)[1] == 0
    traffic(301)
    assert engine.ask(kept, arrival_time=1320.0)[1] == 0
    engine.end()
