"""Several ranks give the pixels of one, each computing its part of the tokens. The ranks are
threads of one process, in torch's own stand-in for a process group.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusion_pipelines import FAMILIES, Folder, load, pixels, run
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from piecework.kernels.platform.platform import Platform
from piecework.lab.diffusion_tiny import Size, make_pipeline_folder
from piecework.runtime.core.image_params import DiffusionParams, InvalidParams
from piecework.runtime.core.messages import GenerateImage, ImageOutput
from piecework.runtime.diffusion import ulysses
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.diffusion.engine import DiffusionEngine, start_ranks
from piecework.runtime.diffusion.media import to_bytes
from piecework.runtime.diffusion.model import DiffusionModel
from piecework.runtime.diffusion.scheduler import ImageScheduler
from piecework.runtime.distributed.ranks import Alone, RankEnded
from piecework.runtime.engine.rank_process import follow

TOLERANCE = 1e-3
ASKED: dict[str, Any] = {
    "prompt": "a photo of a red fox in the snow",
    "seed": 7,
    "width": 96,
    "height": 64,
    "num_inference_steps": 3,
}
TOKENS = {"flux": (24, 512), "qwen-image": (24, None), "wan": (2 * 24, None)}
"""Of a picture or video of that size, and of its prompt where that length is fixed."""


class Rank(Alone):
    """One of `size` ranks whose group is made. `calls`: what rank 0 calls, None at its end."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # Of processes that share no cores.
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()

    def call(self, name: str, *arguments: Any) -> None:
        if self.rank == 0:
            self.calls.put((name, arguments))

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]:
        call = self.calls.get(timeout=60)
        if call is None:
            raise RankEnded
        return call


def asked(family: str, **other: Any) -> dict[str, Any]:
    """Guidance, and prompts of two lengths, where the family has them."""
    ways = {
        "flux": {},
        "qwen-image": {"guidance_scale": 4.0, "negative_prompt": "blurry"},
        "wan": {"guidance_scale": 4.0, "negative_prompt": "blurry", "num_frames": 5},
    }
    return {**ASKED, **ways[family], **other}


def on_ranks(size: int, path: Path, work: Callable[[DiffusionModel], Any], **settings: Any) -> Any:
    """What `work` returns on each rank's own model."""
    config = DiffusionConfig(model_path=str(path), num_threads=1, **settings)
    store, loading = dist.HashStore(), threading.Lock()  # type: ignore[no-untyped-call]

    def on_rank(rank: int) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            # diffusers and transformers load one model at a time.
            with loading:
                model = DiffusionModel(config, Rank(rank, size))
            return work(model)
        except BaseException as error:
            threaded.ProcessLocalGroup.exception_handle(error)
            raise

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(on_rank, range(size)))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_pixels_of_one(pipeline_folder: Folder, family: str) -> None:
    (expected,) = run(load(pipeline_folder(family)), DiffusionParams(**asked(family)))
    first, second = on_ranks(
        2, pipeline_folder(family), lambda model: run(model, DiffusionParams(**asked(family)))[0]
    )
    assert np.abs(first.pixels - expected.pixels).max() < TOLERANCE
    assert torch.equal(first.latents, second.latents), "ranks that differ would drift apart"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_computes_its_part_of_the_tokens(pipeline_folder: Folder, family: str) -> None:
    def lengths(model: DiffusionModel) -> set[int]:
        found: set[int] = set()

        def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            found.add(arguments[0].shape[1])

        for name, module in model.pipeline.transformer.named_modules():
            if name.endswith(("attn.to_q", "attn1.to_q", "attn2.to_q", "ff.net.0.proj")):
                module.register_forward_pre_hook(note)
        pixels(model, **asked(family))
        return found

    image, text = TOKENS[family]
    # FLUX's single blocks have both as one sequence.
    expected = {image // 2} | ({image // 2 + text // 2} if text else set())
    assert on_ranks(2, pipeline_folder(family), lengths) == [expected] * 2


def test_a_server_s_ranks_do_what_its_first_does(pipeline_folder: Folder) -> None:
    """Requests that come, are refused and leave between any two steps."""
    params = [DiffusionParams(**asked("flux", seed=seed)) for seed in (1, 2, 3)]
    odd = DiffusionParams(**asked("flux", width=80, height=48))
    expected = [run(load(pipeline_folder("flux")), each)[0].pixels for each in params]
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(model: DiffusionModel) -> list[ImageOutput]:
        model.ranks.calls = calls  # type: ignore[attr-defined]
        if model.ranks.rank == 1:
            with pytest.raises(RankEnded):
                follow(DiffusionEngine(model), model.ranks)  # type: ignore[arg-type]
            return []
        scheduler, outputs = ImageScheduler(model), list[ImageOutput]()
        coming = {0: params[0], 2: params[1], 3: odd, 4: params[2]}
        for turn in range(100):
            if turn in coming:
                scheduler.add(GenerateImage(rid=str(turn), params=coming[turn]))
            if turn == 5:
                scheduler.abort(["2"])
            if scheduler.has_work:
                outputs += scheduler.step().outputs
        calls.put(None)
        return outputs

    outputs, _ = on_ranks(2, pipeline_folder("flux"), work, max_batch_size=2)
    found = {output.rid: output for output in outputs}
    assert set(found) == {"0", "3", "4"} and found["3"].param == "width"
    for rid, pixels_alone in (("0", expected[0]), ("4", expected[2])):
        image = np.frombuffer(found[rid].pixels, np.uint8).reshape(64, 96, 3)
        assert np.abs(image.astype(int) - to_bytes(pixels_alone)[0]).max() <= 1


def test_every_rank_gives_memory_back(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After loading, and whenever rank 0 does."""
    given: list[int] = []
    monkeypatch.setattr(
        Platform, "give_back_memory", lambda self: given.append(threading.get_ident())
    )
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work(model: DiffusionModel) -> None:
        model.ranks.calls = calls  # type: ignore[attr-defined]
        if model.ranks.rank == 0:
            model.give_back_memory()
            calls.put(None)
            return
        with pytest.raises(RankEnded):
            follow(DiffusionEngine(model), model.ranks)  # type: ignore[arg-type]

    on_ranks(2, pipeline_folder("flux"), work)
    assert sorted(Counter(given).values()) == [2, 2]


def test_prompts_of_several_lengths_side_by_side(pipeline_folder: Folder) -> None:
    """Qwen-Image's are padded to a multiple of the ranks, and what was padded is not looked at."""
    both = [
        DiffusionParams(**asked("qwen-image", prompt=prompt)) for prompt in ("a fox", "a red fox!")
    ]
    expected = [run(load(pipeline_folder("qwen-image")), each)[0].pixels for each in both]
    states, _ = on_ranks(2, pipeline_folder("qwen-image"), lambda model: run(model, *both))
    for state, alone in zip(states, expected, strict=True):
        assert np.abs(state.pixels - alone).max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "size", "text"),
    [
        ("flux", 3, "--ulysses-degree 3 does not divide the 2 attention heads of"),
        ("wan", 4, "choose one of 1, 2"),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused_before_a_rank_starts(
    pipeline_folder: Folder,
    family: str,
    size: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with pytest.raises(ValueError, match=text):
        start_ranks({"model_path": str(pipeline_folder(family)), "num_gpus": size})


def test_a_pipeline_of_diffusers_own_call_is_refused(pixart: Path) -> None:
    with pytest.raises(ValueError, match=r"--ulysses-degree supports FluxPipeline, .*PixArtSigma"):
        start_ranks({"model_path": str(pixart), "ulysses_degree": 2})


def test_prompts_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = make_pipeline_folder(tmp_path, "flux", Size(heads=3))
    with pytest.raises(ValueError, match="3 does not divide the 512 tokens of a prompt"):
        start_ranks({"model_path": str(folder), "num_gpus": 3})


def test_a_diffusers_that_is_too_old_is_refused(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ulysses, "version", lambda name: "0.41.2.dev0")
    with pytest.raises(ValueError, match=r"needs diffusers 0\.42 or newer, and this is 0\.41\.2"):
        start_ranks({"model_path": str(pipeline_folder("flux")), "num_gpus": 2})


def test_two_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="--num-gpus 2 and --ulysses-degree 4 disagree"):
        DiffusionConfig(num_gpus=2, ulysses_degree=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_ranks_do_not_divide_name_the_parameter(
    pipeline_folder: Folder, family: str
) -> None:
    model = load(pipeline_folder(family))
    model.family.ranks = 2  # type: ignore[union-attr]
    frames = {"num_frames": 1} if family == "wan" else {}
    with pytest.raises(InvalidParams, match="80 by 48 makes 15 tokens, which 2 ranks") as raised:
        pixels(model, **{**ASKED, "width": 80, "height": 48, **frames})
    assert raised.value.param == "width"
