"""Draft models that do not suit a model are refused. Answers continue when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.variants import SHORT_CONV
from tiny_models import make_tiny_model

from piecework import LLM, SamplingParams
from piecework.cli.main import main
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.speculative import build

FLAG = "--speculative-draft-model-path"
FIXED: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "whole", num_hidden_layers=1)


def engine(model: Path, draft: Path | None, **settings: Any) -> LLM:
    path = None if draft is None else str(draft)
    return LLM(str(model), speculative_draft_model_path=path, **FIXED, **settings)


def vocabulary(path: Path, model: Path) -> Path:
    """Another model whose tokenizer gives a number to another token."""
    make_tiny_model(path, num_hidden_layers=1)
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|im_begin|>"'))
    return path


def damaged(path: Path, model: Path) -> Path:
    make_tiny_model(path, num_hidden_layers=1)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return path


def windows(path: Path, model: Path) -> Path:
    return make_tiny_model(path, "mistral", num_hidden_layers=2, sliding_window=16)


def states(path: Path, model: Path) -> Path:
    return make_tiny_model(path, "lfm2", **SHORT_CONV)


def nothing(path: Path, model: Path) -> Path:
    return path


REFUSED = {
    vocabulary: "vocabulary differs from the model's in .* choose a draft model with the same",
    damaged: "safetensors",
    windows: "sliding windows, which cannot go back .* choose a draft model with full attention",
    states: "recurrent states or .* which cannot go back .* choose a draft model with full",
    nothing: "does not exist",
}


@pytest.mark.parametrize("make", REFUSED, ids=[each.__name__ for each in REFUSED])
def test_other_models_are_refused(tmp_path: Path, model: Path, make: Any) -> None:
    draft = make(tmp_path / "draft", model)
    with pytest.raises(ValueError, match=f"(?is){FLAG}.*{REFUSED[make]}") as refused:
        engine(model, draft)
    assert str(draft) in str(refused.value)


def test_a_draft_that_does_not_fit_in_memory_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, check = CpuPlatform.memory, build._check_vocabulary

    def full(*tokenizers: Any) -> None:
        check(*tokenizers)
        # The model has taken the memory, and the draft model comes next.
        monkeypatch.setattr(CpuPlatform, "memory", lambda self: memory(self)._replace(free=1 << 16))

    monkeypatch.setattr(build, "_check_vocabulary", full)
    with pytest.raises(ValueError, match=f"(?s){FLAG}.*(--max-total-tokens|memory)"):
        engine(model, model)


def test_answers_continue_when_the_draft_model_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engine(model, model, enable_lora=True)
    drafter: Any = llm.core._speculation._drafter  # type: ignore[union-attr]
    assert drafter._runner.adapters is None
    execute, steps = drafter._runner.execute, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(steps) == 3:
            raise RuntimeError("the device of drafts is gone")
        return execute(*arguments)

    monkeypatch.setattr(drafter._runner, "execute", failing)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 20]
    plain = engine(model, None, speculative_algorithm="none")
    found, wanted = (each.generate(prompts, params) for each in (llm, plain))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert next(steps) == 4, "the draft model is used again"
    assert caplog.text.count("answers continue without drafts") == 1


@pytest.mark.parametrize("flag", ["--speculative-num-steps", "--speculative-num-draft-tokens"])
@pytest.mark.parametrize("value", ["0", "1000", "-1", "many"])
def test_numbers_that_make_no_sense_end_with_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    try:
        code = main(["serve", "--model-path", str(model), flag, value])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]
