"""The explanation tells each distinct piece once and every call in order."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from toy_forward import ToyModel, step

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.explain import Stretch, picture, piece_rows, stretches
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import PiecesReport
from piecework.compilation.plan import Plan
from piecework.kernels.cpu.platform import CpuPlatform


def make_pieces(folder: Path) -> tuple[Plan, PiecesReport]:
    maker = PieceMaker(
        platform=CpuPlatform(), compiler=EagerCompiler(), cache=CompileCache(folder), max_tokens=512
    )
    pieces, report = maker.make(ToyModel(8), step(6))
    return pieces.plan, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_rows_account_for_every_call(folder: Path) -> None:
    rows = piece_rows(*make_pieces(folder))
    assert [row.calls for row in rows] == [1, 7, 1]
    assert [row.num_weights for row in rows] == [5, 5, 3]
    assert "linear x 2" in rows[1].ops
    assert all(row.num_bytes > 0 and row.seconds > 0 for row in rows)


def test_rows_tell_what_was_compiled_and_what_was_there(tmp_path: Path) -> None:
    assert {row.state for row in piece_rows(*make_pieces(tmp_path))} == {"compiled"}
    again = piece_rows(*make_pieces(tmp_path))
    assert {row.state for row in again} == {"from the cache"}
    assert all(row.seconds > 0 for row in again)


def test_like_layers_are_told_once(folder: Path) -> None:
    plan, _ = make_pieces(folder)
    assert stretches(plan) == [
        Stretch(0, "toy::attend", 1),
        Stretch(1, "toy::attend", 7),
        Stretch(2, None, 1),
    ]


def test_the_picture_is_svg_with_every_piece(folder: Path) -> None:
    plan, _ = make_pieces(folder)
    texts = [
        element.text or ""
        for element in ElementTree.fromstring(picture(plan)).iter()
        if element.tag.endswith("text")
    ]
    assert [text for text in texts if text.startswith("piece")] == ["piece 0", "piece 1", "piece 2"]
    assert "× 7" in texts
