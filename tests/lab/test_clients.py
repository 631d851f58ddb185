"""The recipes of clients: each can be written down, and what fails is told in one line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from piecework.lab.clients import __main__ as clients
from piecework.lab.clients.recipes import RECIPES, Recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_the_server_and_leaves_no_mark(name: str) -> None:
    recipe = RECIPES[name]
    texts = [*recipe.environment.values(), *recipe.files.values()]
    assert any("@URL@" in text for text in texts)
    filled = [clients._filled(text, "http://a:1") for text in texts]
    assert not any("@URL@" in text or "@PORT@" in text for text in filled)
    assert any("http://a:1" in text for text in filled)


def test_sessions_tell_how_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / "say"
    program.write_text('#!/bin/sh\n[ "$1" = well ] && cat file || { echo broken >&2; exit 3; }\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(clients, "_install", lambda recipe, folder: programs)
    files = {"file": "the server is @URL@"}
    for words, part in (
        (["say", "well"], "passes in"),
        (["say", "badly"], "fails with 3"),
        (["nothing-like-it"], "no program"),
    ):
        recipe = Recipe(["x"], words, files=files)
        told = clients._session(recipe, tmp_path / words[-1], "http://a:1", 10)
        assert part in told
        assert ("http://a:1" in told) is (words[-1] == "well")
    assert "took longer" in clients._session(
        Recipe(["x"], ["sleep", "5"]), tmp_path / "slow", "http://a:1", 0.1
    )
