"""Images in an engine of two ranks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from thread_ranks import on_ranks, thread_ranks
from tiny_vision import make_tiny_vision, picture_file
from vision_engines import PARAMS

from piecework.runtime import llm as llm_module
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.engine_info import EngineInfo
from piecework.runtime.core.messages import EngineStats
from piecework.runtime.distributed.ranks import EngineEnded
from piecework.runtime.engine.build import build_engine
from piecework.runtime.engine.rank_process import follow
from piecework.runtime.engine.text import TextEngine
from piecework.runtime.llm import LLM, Completion
from piecework.runtime.multimodal import tower
from piecework.runtime.multimodal.preprocess_process import Preprocessor
from piecework.runtime.multimodal.source import ImageSource

FILES = picture_file(48, 40), picture_file(30, 90, seed=1)


def answers(llm: LLM, place: str) -> list[Completion]:
    """Answer prompts with images beside one without, twice."""
    texts = [f"What is {place} here, and {place}?", "No picture at all.", f"{place} again"]
    images = [FILES, [], FILES[1:]]
    return [each for _ in range(2) for each in llm.generate(texts, PARAMS, images=images)]


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "gemma3"])
def test_two_ranks_answer_as_one_process_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_vision(tmp_path, family)
    place = Preprocessor(str(folder)).family.placeholder
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_total_tokens": 512, "context_length": 256,
        "piecewise_cuda_graph": False, "disable_cuda_graph": True, "cpu_bind": "none",
        "num_threads": 1, "speculative_algorithm": "none",
    }  # fmt: skip
    wanted = answers(LLM(str(folder), **settings), place)
    settings["tp_size"] = 2
    make, lock = tower._without_text, Lock()

    def make_alone(source: ImageSource) -> Any:
        """transformers changes how torch starts weights for all threads meanwhile."""
        with lock:
            return make(source)

    monkeypatch.setattr(tower, "_without_text", make_alone)
    stats: list[EngineStats] = []
    with thread_ranks(2) as ranks:
        monkeypatch.setattr(llm_module, "start_ranks", lambda *_: ranks)

        def on_rank(rank: int) -> tuple[list[Completion], EngineInfo | None]:
            if rank == 0:
                try:
                    llm = LLM(str(folder), **settings)
                    return answers(llm, place), llm.info
                finally:
                    ranks.close()
            config = EngineConfig(model_path=str(folder), **settings)
            engine = build_engine(config, progress=False, ranks=ranks)
            with suppress(EngineEnded):
                follow(TextEngine(engine), ranks)
            stats.append(engine.core.stats())
            engine.core.check()
            return [], None

        (found, _), _ = on_ranks(ranks, on_rank)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.error is None and ours.token_ids == theirs.token_ids
        assert [each.logprob for each in ours.logprobs] == pytest.approx(
            [each.logprob for each in theirs.logprobs], abs=1e-4
        )
        assert ours.cached_tokens == theirs.cached_tokens
    assert stats[0].encoded_images_total == 2
