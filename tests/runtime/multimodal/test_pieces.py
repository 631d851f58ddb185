"""Images are encoded in pieces between steps: how much at once, and that nothing changes by it."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from tiny_vision import make_tiny_vision, picture_file
from torch import nn
from vision_engines import Prompt, VisionEngine

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.multimodal.pace import Pace
from piecework.runtime.multimodal.pieces import Pieces, cut_layers
from piecework.runtime.multimodal.preprocess_process import Preprocessor

LONG = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision"))


def test_a_running_text_gets_a_token_between_pieces_of_an_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "encoder_rows", ROWS)
    engine = VisionEngine(folder, mm_encoder_budget=1)
    prompt = Prompt(Preprocessor(str(folder)), "What is IMAGE?", picture_file(48, 40))
    costs: list[list[int]] = []
    advance = Pieces.advance

    def counted(pieces: Pieces[object]) -> int:
        costs[-1].append(advance(pieces))
        return costs[-1][-1]

    monkeypatch.setattr(Pieces, "advance", counted)
    text = engine.add([5, 6, 7], LONG)
    engine.step()
    engine.send(prompt)
    known = len(engine.found[text][0])
    while not engine.encodings.images_total:
        costs.append([])
        engine.step()
        assert len(engine.found[text][0]) == known + len(costs)
    # The first step finds that the image is needed.
    assert costs.pop(0) == []
    tower = engine.encodings.tower
    # The projector multiplies most for a row.
    proj = tower.connector.modality_projection.proj
    longest = ROWS * proj.in_features * proj.out_features
    for pieces in costs:
        assert max(pieces) <= longest
        assert len(pieces) == 1 or sum(pieces) <= tower.patch_cost + max(pieces)
    patches = prompt.images[0].tensors["pixel_values"].shape[1] * 16
    assert len(costs) >= patches / ROWS
    engine.end()


def test_blocks_of_rows_give_what_the_whole_gives(folder: Path) -> None:
    engine = VisionEngine(folder)
    tower, family = engine.encodings.tower, engine.encodings.family
    image = Prompt(Preprocessor(str(folder)), "IMAGE", picture_file(90, 60)).images[0]
    tensors = {name: torch.from_numpy(each.array().copy()) for name, each in image.tensors.items()}
    found = []
    for rows in (None, 1, 5):
        part = next(family.parts(tensors))
        pieces = Pieces(lambda part=part: family.features(tower.model, part, torch.float32), rows)
        count = 0
        while not pieces.is_done:
            pieces.advance()
            count += 1
        assert pieces.result is not None
        found.append((count, pieces.result[0]))
    (whole, wanted), (by_row, rows), (by_five, fives) = found
    assert by_row > by_five > whole
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fives, wanted, atol=1e-5, rtol=1e-5)
    engine.end()


def test_a_call_that_is_given_up_leaves_no_memory() -> None:
    freed: list[weakref.ref[torch.Tensor]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 4, 4)

        def forward(self) -> torch.Tensor:
            image = torch.zeros(1, 3, 40, 16)
            freed.append(weakref.ref(image))
            result: torch.Tensor = self.conv(image)
            return result

    model = Model()
    assert cut_layers(model) == 3 * 2 * 16
    pieces = Pieces(model, 4)
    assert [pieces.advance() for _ in range(3)] == [4 * 3 * 2 * 16] * 3
    assert freed[0]() is not None
    del pieces
    assert freed[0]() is None


def test_an_image_takes_half_as_long_as_the_step_before() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    # The first piece measures.
    assert pace.allowance(7) == 0
    pace.encoded(1000, 0.01)
    now = 0.02
    assert pace.allowance(8) == pytest.approx(1000 / 0.01 * 0.02 / 2)
    # Without steps, nobody waits.
    assert pace.allowance(8) == pytest.approx(1000 / 0.01 * 0.05)
    # A long time after the last image.
    now = 100.0
    assert pace.allowance(12) == 0
    assert Pace(5.0).allowance(1) == 5
