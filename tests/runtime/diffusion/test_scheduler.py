"""The scheduler of images: order, turns, cancels, and what becomes of errors; images are those that
are made alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_pipelines import Folder, load, pixels
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.core.messages import GenerateImage, ImageOutput
from piecework.runtime.diffusion.clock import Clock
from piecework.runtime.diffusion.model import DiffusionModel
from piecework.runtime.diffusion.scheduler import ImageScheduler
from piecework.runtime.diffusion.state import State

SMALL = {"width": 32, "height": 32}


@pytest.fixture(scope="module")
def model(pipeline_folder: Folder) -> DiffusionModel:
    return load(pipeline_folder("flux"), max_batch_size=2)


def asked(rid: str, **changes: Any) -> GenerateImage:
    settings: dict[str, Any] = {
        "prompt": "a fox",
        "num_inference_steps": 2,
        "num_frames": 1,
        **SMALL,
        **changes,
    }
    return GenerateImage(rid=rid, params=DiffusionParams(**settings))


def finish(scheduler: ImageScheduler) -> dict[str, ImageOutput]:
    """Every output, in the order of their ends."""
    outputs: dict[str, ImageOutput] = {}
    for _ in range(1000):
        if not scheduler.has_work:
            return outputs
        for output in scheduler.step().outputs:
            assert output.rid not in outputs
            outputs[output.rid] = output
    raise AssertionError("the scheduler does not come to an end")


def test_the_progress_of_an_image_is_told_with_each_step(model: DiffusionModel) -> None:
    scheduler = ImageScheduler(model)
    scheduler.add(asked("a"))
    told = []
    while scheduler.has_work:
        told.append(scheduler.step().progress)
    assert told == [{"a": (0, 2)}, {"a": (1, 2)}, {"a": (2, 2)}, {}]


def image_of(output: ImageOutput) -> np.ndarray:
    assert output.finish_reason is FinishReason.STOP, output.error
    return np.frombuffer(output.pixels, np.uint8).reshape(output.height, output.width, 3)


def shapes_of_batches(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, int]]:
    """Filled with the size and the number of states of each forward."""
    seen: list[tuple[Any, int]] = []
    plain = model.denoise

    def denoise(states: Sequence[State], clock: Clock) -> None:
        seen.append((states[0].shape[:2], len(states)))
        plain(states, clock)

    monkeypatch.setattr(model, "denoise", denoise)
    return seen


JOBS = st.lists(
    st.tuples(
        st.sampled_from([(32, 32), (48, 32), (32, 48)]), st.integers(1, 3), st.integers(0, 3)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(5, exploring=8))
@given(
    jobs=JOBS,
    gone=st.sets(st.integers(0, 5)),
    moments=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_any_mix_of_sizes_steps_and_cancels_gives_the_images_made_alone(
    model: DiffusionModel, jobs: list[Any], gone: set[int], moments: list[int]
) -> None:
    """Requests come between any two steps, and some leave two steps later."""
    scheduler, outputs = ImageScheduler(model), list[ImageOutput]()
    for number, ((width, height), steps, seed) in enumerate(jobs):
        scheduler.add(
            asked(str(number), width=width, height=height, num_inference_steps=steps, seed=seed)
        )
        for _ in range(moments[number]):
            outputs += scheduler.step().outputs if scheduler.has_work else []
        if number in gone:
            scheduler.abort([str(number)])
    outputs += finish(scheduler).values()
    done = {output.rid: output for output in outputs}
    assert len(done) == len(outputs) and {str(n) for n in range(len(jobs)) if n not in gone} <= set(
        done
    )
    for rid, output in done.items():
        (width, height), steps, seed = jobs[int(rid)]
        alone = pixels(
            model, prompt="a fox", width=width, height=height, num_inference_steps=steps, seed=seed
        )[0]
        assert np.abs(image_of(output) / 255 - alone).max() <= 1.01 / 255
    assert not scheduler.stats().running_requests and not scheduler.stats().queued_requests


def test_requests_of_one_size_share_forwards_and_sizes_take_turns(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = shapes_of_batches(model, monkeypatch)
    scheduler = ImageScheduler(model)
    for rid in ("a", "b"):
        scheduler.add(asked(rid))
    finish(scheduler)
    assert seen == [((32, 32), 2)] * 2
    seen.clear()
    for rid, size in (("wide", (48, 32)), ("high", (32, 48))):
        scheduler.add(asked(rid, width=size[0], height=size[1]))
    assert list(finish(scheduler)) == ["wide", "high"]
    assert seen == [((48, 32), 1), ((32, 48), 1)] * 2


def test_one_that_comes_later_joins_the_next_step(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = shapes_of_batches(model, monkeypatch)
    scheduler = ImageScheduler(model)
    scheduler.add(asked("first", num_inference_steps=4))
    while not seen:
        scheduler.step()
    scheduler.add(asked("second", num_inference_steps=1))
    assert list(finish(scheduler)) == ["second", "first"]
    assert [width for _, width in seen] == [1, 2, 1, 1]


def test_a_bad_request_is_answered_at_once_however_many_wait(model: DiffusionModel) -> None:
    scheduler = ImageScheduler(model)
    for number in range(5):
        scheduler.add(asked(str(number)))
    scheduler.add(asked("bad", width=33))
    (output,) = scheduler.step().outputs
    assert (output.rid, output.param, output.code) == (
        "bad",
        "width",
        "invalid_value",
    ) and "choose 32 or 48" in (output.error or "")
    assert len(finish(scheduler)) == 5


def failing(model: DiffusionModel, monkeypatch: pytest.MonkeyPatch, is_too_much: Any) -> None:
    plain = model.pipeline.transformer.forward

    def forward(hidden_states: torch.Tensor, **named: Any) -> Any:
        if is_too_much(hidden_states):
            raise torch.OutOfMemoryError("out of memory")
        return plain(hidden_states=hidden_states, **named)

    monkeypatch.setattr(model.pipeline.transformer, "forward", forward)


def test_what_does_not_fit_side_by_side_is_made_one_at_a_time(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(model, monkeypatch, lambda latents: len(latents) > 1)
    scheduler = ImageScheduler(model)
    for rid in ("a", "b", "c"):
        scheduler.add(asked(rid, seed=ord(rid)))
    outputs = finish(scheduler)
    for rid, output in outputs.items():
        alone = pixels(model, prompt="a fox", num_inference_steps=2, seed=ord(rid), **SMALL)[0]
        assert np.abs(image_of(output) / 255 - alone).max() <= 1.01 / 255
    assert len(outputs) == 3


def test_what_does_not_fit_at_all_is_refused_and_the_others_go_on(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(model, monkeypatch, lambda latents: latents.shape[1] > 4)
    scheduler = ImageScheduler(model)
    scheduler.add(asked("large", width=64))
    scheduler.add(asked("small"))
    outputs = finish(scheduler)
    assert (outputs["large"].code, outputs["large"].param) == ("out_of_memory", "size")
    assert outputs["small"].finish_reason is FinishReason.STOP


def test_what_a_pipeline_raises_ends_one_image_alone(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step that it shares with another, and when its prompt is encoded."""
    plain_predict, plain_encode = model.family.predict, model.family.encode_text  # type: ignore[union-attr]

    def predict(states: Sequence[State]) -> torch.Tensor:
        if any(state.params.seed == 13 and state.step == 1 for state in states):
            raise RuntimeError("a bug")
        return plain_predict(states)

    def encode(params: DiffusionParams) -> Any:
        if params.seed == 14:
            raise TypeError("another bug")
        return plain_encode(params)

    monkeypatch.setattr(model.family, "predict", predict)
    monkeypatch.setattr(model.family, "encode_text", encode)
    scheduler = ImageScheduler(model)
    for seed in (12, 13, 14, 15):
        scheduler.add(asked(str(seed), seed=seed))
    outputs = finish(scheduler)
    assert [outputs[rid].error for rid in ("13", "14")] == [
        "the pipeline failed with RuntimeError",
        "the pipeline failed with TypeError",
    ]
    assert [outputs[rid].code for rid in ("13", "14")] == [None, None]
    for seed in (12, 15):
        alone = pixels(model, prompt="a fox", num_inference_steps=2, seed=seed, **SMALL)[0]
        assert np.abs(image_of(outputs[str(seed)]) / 255 - alone).max() <= 1.01 / 255


@pytest.mark.parametrize("place", ["validate", "decode"])
def test_an_image_that_cannot_be_checked_or_written_down_ends_alone(
    model: DiffusionModel, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(model, place)

    def fail(what: Any, clock: Clock) -> Any:
        if (what if place == "validate" else what.params).seed == 13:
            if place == "validate":
                raise TypeError("a bug")
            # No pixels that `to_bytes` could take.
            what.pixels = ["nothing"]
            return None
        return plain(what, clock)

    monkeypatch.setattr(model, place, fail)
    scheduler = ImageScheduler(model)
    for seed in (12, 13):
        scheduler.add(asked(str(seed), seed=seed))
    outputs = finish(scheduler)
    assert "the pipeline failed with" in (outputs["13"].error or "")
    assert outputs["12"].finish_reason is FinishReason.STOP


def test_a_broken_device_is_not_taken_for_a_request_s_fault(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        monkeypatch.setattr(type(model.platform), "synchronize", broken)
        raise RuntimeError("device-side assert triggered")

    def broken(self: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(model.family, "predict", fail)
    scheduler = ImageScheduler(model)
    scheduler.add(asked("a"))
    with pytest.raises(RuntimeError, match="the device is lost"):
        finish(scheduler)


def test_a_server_makes_no_image_of_which_a_step_would_hold_up_all_others(
    model: DiffusionModel, pixart: Path
) -> None:
    """Four times the pipeline's own 1024x1024, or a megapixel where its own size is small, or as
    many as it was told.
    """
    small = {"num_threads": 1, "max_image_pixels": 32 * 32}
    for each, fits, too_large in (
        (model, (2048, 2048), (2048, 2064)),
        (load(pixart), (1024, 1024), (1024, 1026)),
        (DiffusionModel(replace(model.config, **small)), (32, 32), (32, 48)),
    ):
        scheduler = ImageScheduler(each)
        for rid, (width, height) in (("fits", fits), ("too large", too_large)):
            scheduler.add(asked(rid, width=width, height=height))
        (refused,) = scheduler.step().outputs
        assert (refused.rid, refused.param, refused.code) == ("too large", "width", "invalid_value")
        assert "--max-image-pixels" in (refused.error or "")


def test_a_pipeline_that_runs_whole_is_left_between_its_steps(pixart: Path) -> None:
    """Meanwhile requests are heard: the first leaves after two steps, another comes and is made."""
    model = load(pixart)
    steps = 0

    def between_steps() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            scheduler.abort(["leaves"])
            scheduler.add(asked("comes", seed=3))

    scheduler = ImageScheduler(model)
    scheduler.between_steps = between_steps
    scheduler.add(asked("leaves", num_inference_steps=20))
    outputs = finish(scheduler)
    assert list(outputs) == ["comes"] and steps == 3 + 2
    expected = pixels(model, prompt="a fox", num_inference_steps=2, seed=3, **SMALL)[0]
    assert np.abs(image_of(outputs["comes"]) / 255 - expected).max() <= 1.01 / 255
