"""Logits processors of the user, with vLLM's interface, in a real engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.runtime.sampling.plug_ins import PlugInFault, PlugIns, Shape, load_plug_ins

SOURCE = '''
import torch

UPDATES = []


class Only:
    """Allows one token for the requests that ask for it, and counts what it sees."""

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.model_config.get_vocab_size() > 0
        self.rows = {}

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("token", 0) < 0:
            raise ValueError("vllm_xargs: token must be at least 0")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        UPDATES.append(batch_update)
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows[index] = (params, prompt, output)

    def apply(self, logits):
        assert sorted(self.rows) == list(range(len(logits)))
        for index, (params, prompt, output) in self.rows.items():
            asked = params.extra_args or {}
            if asked.get("raises") == len(output):
                raise RuntimeError("it is broken")
            if "token" in asked:
                token = asked["token"] + len(output)
                keep = logits[index, token].clone()
                logits[index] = float("-inf")
                logits[index, token] = keep
        return logits


class Invariant(Only):
    def is_argmax_invariant(self):
        return True

    def apply(self, logits):
        raise AssertionError("greedy requests do not need it")


class Wrong(Only):
    def apply(self, logits):
        return logits[:, :1]


class Broken:
    def __init__(self, vllm_config, device, is_pin_memory):
        raise OSError("no table")

    apply = update_state = is_argmax_invariant = lambda *_: None


class NoMethods:
    pass
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("plug_ins")
    (folder / "own_processors.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("own_processors", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def engine(model: str, *names: str) -> LLM:
    return LLM(
        model,
        dtype="float32",
        max_total_tokens=1024,
        num_threads=1,
        logits_processors=",".join(f"own_processors:{name}" for name in names),
    )


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return engine(model, "Only", "Invariant")


def params(count: int = 5, **extra: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_new_tokens=count, ignore_eos=True, extra_args=extra or None
    )


def test_requests_of_a_batch_are_changed_one_by_one(llm: LLM, model: str) -> None:
    asked = [params(token=40), params(), params(3, token=90), params(token=60)]
    found = llm.generate([[1, 2], [3, 4], [5], [6, 7, 8]], asked)
    assert [one.token_ids for one in found[::2]] == [[40, 41, 42, 43, 44], [90, 91, 92]]
    assert found[3].token_ids == [60, 61, 62, 63, 64]
    plain = LLM(model, dtype="float32", max_total_tokens=1024, num_threads=1)
    assert found[1].token_ids == plain.generate([[3, 4]], params())[0].token_ids
    updates = sys.modules["own_processors"].UPDATES
    assert any(update is None for update in updates)


def test_speculation_is_off(llm: LLM) -> None:
    assert llm.core._speculation is None
    # A text that repeats itself would be guessed.
    again = llm.generate([[1, 2] * 20], params(20, token=10))[0]
    assert again.token_ids == list(range(10, 30))


def test_a_class_that_raises_ends_only_its_request(llm: LLM) -> None:
    asked = [params(token=40), params(token=50, raises=2), params(token=60)]
    found = llm.generate([[1, 2], [3, 4], [5]], asked)
    assert found[0].token_ids == [40, 41, 42, 43, 44]
    assert found[2].token_ids == [60, 61, 62, 63, 64]
    assert found[1].error is not None and found[1].token_ids == [50, 51]
    assert llm.generate([[1]], params(2, token=7))[0].token_ids == [7, 8]


def test_a_class_that_keeps_the_best_token_is_asked_when_tokens_are_drawn(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, max_new_tokens=2, ignore_eos=True)
    found = llm.generate([[1], [2]], [drawn, params(2, token=40)])
    assert found[0].error is not None and found[1].token_ids == [40, 41]


def test_a_class_may_refuse_a_request(llm: LLM) -> None:
    (found,) = llm.generate([[1]], params(token=-1))
    assert found.error is not None and "token must be at least 0" in found.error


def test_a_class_that_returns_other_logits_ends_the_request(model: str) -> None:
    (found,) = engine(model, "Wrong").generate([[1, 2]], params())
    assert found.error is not None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("own_processors:Nothing", "cannot be imported"),
        ("no_such_module:Only", "PYTHONPATH"),
        ("own_processors:NoMethods", "no class with apply"),
        ("own_processors:Broken", "no table"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_at_the_start(name: str, part: str) -> None:
    with pytest.raises(PlugInFault, match=part):
        load_plug_ins([name], Shape("m", 9, 9, 9), torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"logits_processors": "module.Class"}, "module:Class"),
        ({"logits_processors": "a:B", "tp_size": 2}, "one rank"),
        ({"logits_processors": "a:B", "speculative_algorithm": "ngram"}, "exclude each other"),
    ],
)
def test_bad_flags_are_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=f"--logits-processors.*{part}"):
        EngineConfig(**settings)


def test_without_the_flag_nothing_is_loaded(tmp_path: Path) -> None:
    assert load_plug_ins([], Shape("m", 9, 9, 9), torch.device("cpu")) is None
    assert not EngineConfig().plug_ins
    assert PlugIns([], Shape("m", 9, 9, 9), torch.device("cpu")).validate(params()) is None
