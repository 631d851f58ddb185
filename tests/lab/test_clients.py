"""The recipes of clients: each can be written down, and what fails is told in one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import gguf
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


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_served_copy_has_a_long_context(tmp_path: Path, kind: str) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    if kind == "file":
        writer = gguf.GGUFWriter(model, "llama")
        writer.add_context_length(128)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    else:
        model.mkdir()
        (model / "config.json").write_text('{"max_position_embeddings": 128}')
    copy = clients._with_long_context(model, scratch)
    if kind == "file":
        lengths = [gguf.GGUFReader(path).fields["llama.context_length"] for path in (copy, model)]
        assert [length.contents() for length in lengths] == [65536, 128]
    else:
        assert json.loads((copy / "config.json").read_text())["max_position_embeddings"] == 65536
        assert "128" in (model / "config.json").read_text()


def test_sessions_tell_how_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / "say"
    program.write_text('#!/bin/sh\n[ "$1" = well ] && cat file || { echo broken >&2; exit 3; }\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(clients, "_install", lambda recipe, folder: programs)
    monkeypatch.setattr(clients, "_version", lambda recipe, folder: "1.2")
    files = {"file": "the server is @URL@"}
    for words, part in (
        (["say", "well"], "passes with 1.2 in"),
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
