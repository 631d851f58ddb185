"""Engines that pause, sleep, wake and change their weights: no request is lost, and no answer mixes
two models.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import wait
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_tiny_model

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.core.control_messages import (
    Control,
    Pause,
    ReadWeights,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import control
from piecework.runtime.tiers import tiers
from piecework.runtime.tiers.tiers import Tiers
from tests.runtime.text_engines import Engine, prompt_of

LONG = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
PROMPT = prompt_of(1, 30)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), "llama", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def texts(models: list[Path]) -> list[list[int]]:
    """What each model answers."""
    return [answer_of(Engine(model, None)) for model in models]


def answer_of(engine: Engine) -> list[int]:
    rid = engine.add(PROMPT, LONG)
    return engine.run()[rid][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", [1, 2])
def test_requests_continue_after_a_sleep_with_the_same_texts(
    models: list[Path], level: int, dtype: str
) -> None:
    settings: dict[str, Any] = {"dtype": dtype}
    if dtype == "bfloat16":
        # Tokens that are computed again after a sleep must have the same bits.
        settings |= {"disable_cuda_graph": False, "piecewise_cuda_graph": False}
        settings["batch_invariant"] = True
    engine = Engine(models[0], None, **settings)
    expected = answer_of(engine)
    for _ in range(3):
        running = engine.add(PROMPT, LONG)
        for _ in range(5):
            engine.step()
        answer = engine.control(Sleep(level=level))
        assert answer.error is None and engine.engine.work() is None
        assert "sleeps already" in (engine.control(Sleep()).error or "")
        assert "wake it" in (engine.control(UpdateWeights(model_path=str(models[1]))).error or "")
        waiting = engine.add(PROMPT, LONG)
        engine.step()
        assert len(engine.found[running][0]) < 40 and waiting not in engine.found
        assert engine.control(WakeUp()).error is None
        engine.run()
        assert engine.found[running][0] == engine.found[waiting][0] == expected
    assert "does not sleep" in (engine.control(WakeUp()).error or "")


@pytest.mark.parametrize("retract", [False, True])
def test_a_pause_keeps_requests_and_their_texts(
    models: list[Path], texts: list[list[int]], retract: bool
) -> None:
    engine = Engine(models[0], None)
    running = engine.add(PROMPT, LONG)
    for _ in range(5):
        engine.step()
    assert engine.control(Pause(retract=retract)).error is None
    begun = len(engine.found[running][0])
    waiting = engine.add(PROMPT, LONG)
    for _ in range(5):
        assert engine.engine.work() is None
        engine.step()
    assert len(engine.found[running][0]) == begun
    assert (engine.engine.report().stats.running_requests == 0) == retract  # type: ignore[union-attr]
    engine.control(Resume())
    engine.run()
    assert engine.found[running][0] == engine.found[waiting][0] == texts[0]


def test_each_answer_is_of_one_model_while_weights_change(
    models: list[Path], texts: list[list[int]]
) -> None:
    engine, current = Engine(models[0], None), 0
    for _ in range(4):
        running = engine.add(PROMPT, LONG)
        engine.step()
        other = 1 - current
        message = UpdateWeights(model_path=str(models[other]))
        assert not list(engine.engine.handle(message))
        engine.step()
        later = engine.add(PROMPT, LONG)
        engine.run()
        assert engine.answers[-1].error is None
        assert engine.found[running][0] == texts[current]
        # It may have begun before the new weights were loaded.
        assert engine.found[later][0] in texts
        current = other
        assert answer_of(engine) == texts[current], "a prefix of the old weights is used"


def test_running_requests_may_continue_on_the_new_weights(
    models: list[Path], texts: list[list[int]]
) -> None:
    engine = Engine(models[0], None)
    running = engine.add(PROMPT, LONG)
    for _ in range(8):
        engine.step()
    assert not list(engine.engine.handle(UpdateWeights(model_path=str(models[1]), at_once=True)))
    engine.step()
    # Else the request may end before the new weights are loaded.
    wait([engine.engine._control._loading])  # type: ignore[list-item]
    engine.run()
    begun, rest = engine.found[running][0], Engine(models[1], None)
    assert begun[:5] == texts[0][:5] and len(begun) == 40
    # The old part is a prompt of the new model.
    changed = next(n for n in range(40) if begun[n] != texts[0][n])
    rid = rest.add([*PROMPT, *begun[:changed]], SamplingParams(
        temperature=0.0, max_new_tokens=40 - changed, ignore_eos=True))  # fmt: skip
    assert rest.run()[rid][0] == begun[changed:]
    assert answer_of(engine) == texts[1]


def test_weights_that_do_not_fit_change_nothing(
    models: list[Path], texts: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(models[0], None)
    wider = make_tiny_model(tmp_path / "wider", "llama", intermediate_size=128)
    other = make_tiny_model(tmp_path / "other", "qwen3")
    for path, told in (
        (wider, "its architecture, formats and shapes must be the same"),
        (other, "its architecture, formats and shapes must be the same"),
        (tmp_path / "none", "none"),
    ):
        assert told in (engine.control(UpdateWeights(model_path=str(path))).error or "")
        assert answer_of(engine) == texts[0]


def test_blocks_on_disk_are_those_of_the_weights_in_use(
    models: list[Path], texts: list[list[int]], tmp_path: Path
) -> None:
    engine = Engine(models[0], tmp_path)
    assert answer_of(engine) == texts[0]
    assert engine.control(UpdateWeights(model_path=str(models[1]))).error is None
    assert answer_of(engine) == texts[1]
    engine.end()
    again = Engine(models[1], tmp_path)
    rid = again.add(PROMPT, LONG)
    assert again.run()[rid] == (texts[1], 24)


@pytest.mark.parametrize(
    ("messages", "model"),
    [((UpdateWeights, Resume), 1), ((Sleep, WakeUp), 0)],
    ids=["update", "sleep"],
)
def test_a_prefix_that_is_being_loaded_does_not_outlive_its_weights_or_its_memory(
    models: list[Path],
    texts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: tuple[type[Control], ...],
    model: int,
) -> None:
    first = Engine(models[0], tmp_path)
    answer_of(first)
    first.end()
    go_on, read = Event(), Tiers.read

    def slow(self: Tiers, piece: tiers.Piece) -> Any:
        assert not piece.places[0] or go_on.wait(10.0)
        return read(self, piece)

    monkeypatch.setattr(Tiers, "read", slow)
    monkeypatch.setattr(tiers, "_AT_ONCE", 1)
    engine = Engine(models[0], tmp_path)
    rid = engine.add(PROMPT, LONG)
    while not engine.engine._core.cache.tree.total_pages:
        engine.step()
    for kind in messages:
        members = {"model_path": str(models[1])} if kind is UpdateWeights else {}
        assert engine.control(kind(**members)).error is None
    go_on.set()
    assert engine.run()[rid][0] == texts[model]


def test_a_paused_engine_gets_new_weights(models: list[Path], texts: list[list[int]]) -> None:
    engine = Engine(models[0], None)
    engine.add(PROMPT, LONG)
    for _ in range(5):
        engine.step()
    engine.control(Pause())
    assert not list(engine.engine.handle(UpdateWeights(model_path=str(models[1]))))
    assert not list(engine.engine.handle(Resume()))
    until = time.monotonic() + 20.0
    while len(engine.answers) < 3 and time.monotonic() < until:
        engine.step()
    assert [answer.error for answer in engine.answers] == [None] * 3
    engine.run()
    assert answer_of(engine) == texts[1]


def test_an_engine_whose_stored_weights_are_lost_reads_those_of_its_model(
    models: list[Path], texts: list[list[int]]
) -> None:
    engine = Engine(models[0], None)
    engine.control(Sleep())
    stored = engine.engine._control._stored
    assert stored is not None
    stored._file.truncate(1000)
    assert engine.control(WakeUp()).error is None
    assert answer_of(engine) == texts[0]


def test_an_engine_wakes_with_the_files_that_its_model_has_then(
    models: list[Path], texts: list[list[int]], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    engine = Engine(model, tmp_path / "kv")
    assert answer_of(engine) == texts[0]
    engine.control(Sleep(level=2))
    weights = model / "model.safetensors"
    weights.rename(tmp_path / "away")
    assert engine.control(WakeUp()).error is not None and engine.engine.work() is None
    shutil.copy(models[1] / "model.safetensors", weights)
    assert engine.control(WakeUp()).error is None
    assert answer_of(engine) == texts[1], "blocks of the old weights are found"


def test_an_error_of_the_loader_is_an_answer(
    models: list[Path], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken file")

    engine = Engine(models[0], None)
    monkeypatch.setattr(control, "load_like", fail)
    answer = engine.control(UpdateWeights(model_path=str(models[1])))
    assert "RuntimeError: broken file" in (answer.error or "")
    assert answer_of(engine) == texts[0]


def test_numbers_of_a_parameter_are_read_by_its_name(models: list[Path]) -> None:
    engine = Engine(models[0], None)
    numbers = engine.control(ReadWeights(name="model.norm.weight", count=3)).numbers
    parameter = dict(engine.engine._runner.model.named_parameters())["model.norm.weight"]
    assert numbers == parameter[:3].tolist()
    assert "there is no parameter 'x'" in (
        engine.control(ReadWeights(name="x", count=1)).error or ""
    )


def test_a_sleeping_engine_holds_neither_weights_nor_pages(models: list[Path]) -> None:
    engine = Engine(models[0], None)
    answer_of(engine)
    runner = engine.engine._runner
    held = [runner.pool.k[0], dict(runner.model.named_parameters())["model.embed_tokens.weight"]]
    # Whole pages of memory are freed, so the ends of a tensor may stay.
    inner = [tensor.detach().flatten()[1024:-1024] for tensor in held]
    assert all(tensor.count_nonzero() for tensor in inner)
    assert engine.control(Sleep(level=1)).error is None
    assert not any(tensor.count_nonzero() for tensor in inner)
    answer = engine.control(ReadWeights(name="model.norm.weight", count=1))
    assert "wake it before its weights are read" in (answer.error or "")


def test_weights_without_room_or_of_several_ranks_are_refused(
    models: list[Path], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, memory = Engine(models[0], None), CpuPlatform.memory
    message = UpdateWeights(model_path=str(models[1]))
    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "memory", lambda self: memory(self)._replace(free=1 << 10))
        assert "but 0.0 GiB are free" in (engine.control(message).error or "")
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._runner, "ranks", SimpleNamespace(rank=0, size=2))
        for each in (message, Sleep(), Pause()):
            assert "needs an engine of one rank" in (engine.control(each).error or "")
    assert answer_of(engine) == texts[0]
