"""The engine of a diffusion pipeline before it is ready: the sizes that it warms up."""

from __future__ import annotations

import pytest
from diffusion_pipelines import Folder

from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.core.messages import DiffusionInfo
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.diffusion.engine import DiffusionEngine
from piecework.runtime.diffusion.model import DiffusionModel, OutOfMemory


def start(folder: Folder, **settings: object) -> DiffusionInfo:
    config = DiffusionConfig(
        model_path=str(folder("flux")), num_threads=1, max_batch_size=2, **settings
    )  # type: ignore[arg-type]
    return DiffusionEngine(DiffusionModel(config)).ready().info


def test_every_size_of_an_image_and_of_a_batch_is_warmed_up(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[tuple[int | None, int | None, int]] = []
    plain = DiffusionModel.warm_up

    def warm_up(self: DiffusionModel, params: DiffusionParams, num_outputs: int = 1) -> float:
        warmed.append((params.width, params.height, num_outputs))
        return plain(self, params, num_outputs)

    monkeypatch.setattr(DiffusionModel, "warm_up", warm_up)
    info = start(pipeline_folder, warmup=True, warmup_resolutions="32x32, 48x32")
    assert warmed == [(32, 32, 1), (32, 32, 2), (48, 32, 1), (48, 32, 2)]
    assert info.warm_up_seconds > 0 and info.max_running_requests == 2


def test_nothing_is_warmed_up_unasked(pipeline_folder: Folder) -> None:
    info = start(pipeline_folder)
    assert info.warm_up_seconds == 0 and info.default_size == (1024, 1024) and info.compiled is None


def test_a_size_that_cannot_be_made_is_the_users_to_mend(pipeline_folder: Folder) -> None:
    with pytest.raises(
        ValueError, match=r"--warmup-resolutions: width must be a multiple of 16.*choose 32 or 48"
    ):
        start(pipeline_folder, warmup=True, warmup_resolutions="33x32")


def test_a_size_that_no_request_may_have_is_not_warmed_up(pipeline_folder: Folder) -> None:
    with pytest.raises(
        ValueError,
        match=r"--warmup-resolutions: width times height is 1,536 pixels, more than the 1,024",
    ):
        start(pipeline_folder, warmup=True, warmup_resolutions="32x32,48x32", max_image_pixels=1024)


def test_a_warm_up_that_does_not_fit_the_memory_is_left_out(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> float:
        raise OutOfMemory("the device is out of memory")

    monkeypatch.setattr(DiffusionModel, "warm_up", fail)
    assert start(pipeline_folder, warmup=True).warm_up_seconds == 0
