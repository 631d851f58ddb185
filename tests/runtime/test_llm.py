"""`piecework.LLM`: what a user types first works, and what comes back prints as what it holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_models import EOS_ID, make_tiny_model

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.runtime.process.ipc import decode, encode


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(
        model=str(path),
        dtype="float",
        max_model_len=128,
        max_num_seqs=4,
        max_total_tokens=512,
        num_threads=1,
    )


def test_settings_may_have_the_names_that_vllm_gives_them(llm: LLM) -> None:
    config = llm.config
    assert (config.dtype, config.context_length, config.max_running_requests) == ("float32", 128, 4)
    with pytest.raises(ValueError, match="model_path is given twice, once as model; give it once"):
        LLM("a", model="b")


def test_steps_do_not_depend_on_time_unless_that_is_asked_for(llm: LLM) -> None:
    assert llm.config.mixed_step_seconds == 0
    assert llm.core._pace is not None and llm.core._pace.limit() is None


def test_max_tokens_is_max_new_tokens() -> None:
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5) != SamplingParams()
    assert (
        SamplingParams(max_tokens=5).max_new_tokens == 5 and SamplingParams().max_new_tokens == 128
    )
    assert "max_new_tokens=5" in repr(SamplingParams(max_tokens=5))
    assert dataclasses.replace(SamplingParams(max_tokens=5), max_new_tokens=6).max_new_tokens == 6


def test_both_names_of_one_number_are_refused() -> None:
    with pytest.raises(
        ValueError, match="max_new_tokens 5 and max_tokens 7 are two names of one number; give one"
    ):
        SamplingParams(max_new_tokens=5, max_tokens=7)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        SamplingParams(max_tokens=-1)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(max_tokens=5), SamplingParams(max_new_tokens=128)]
)
def test_the_engine_gets_the_number_whatever_it_was_called(params: SamplingParams) -> None:
    message = GenerateRequest(rid="r", input_ids=[1], params=params)
    assert decode(encode(message)) == message


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ids = llm.tokenizer.encode("The quick brown")
    results = [
        llm.generate(prompts, params)
        for prompts in ("The quick brown", ["The quick brown"], ids, [ids])
    ]
    assert [[one.token_ids for one in found] for found in results] == [
        [results[0][0].token_ids]
    ] * 4
    assert llm.generate([], params) == []


def test_a_result_prints_as_what_it_holds(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (found,) = llm.generate("The quick brown", params)
    count = len(found.prompt_ids)
    counts = f"prompt_tokens={count}, completion_tokens=3, cached_tokens={found.cached_tokens}"
    assert repr([found]) == f"[Completion(text={found.text!r}, finish_reason='length', {counts})]"
    (failed,) = llm.generate([[1] * 500], params)
    assert "finish_reason='error'" in repr(failed) and f"error={failed.error!r}" in repr(failed)


def test_a_wrong_number_of_parameters_is_one_clear_line(llm: LLM) -> None:
    with pytest.raises(
        ValueError, match="2 prompts came with 1 sampling parameters; give one for all, or one each"
    ):
        llm.generate(["a", "b"], [SamplingParams()])


def test_the_tokenizers_own_end_token_ends_a_text_that_the_models_files_let_go_on(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path, eos_token_id=None)
    assert ModelConfig.from_pretrained(model).eos_token_ids == []
    own = LLM(str(model), max_total_tokens=512, num_threads=1)

    def ends(**params: object) -> tuple[FinishReason | None, int]:
        likely = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS_ID: 100.0}, **params)  # type: ignore[arg-type]
        (done,) = own.generate([[5, 6, 7]], likely)
        return done.finish_reason, len(done.token_ids)

    assert ends() == (FinishReason.STOP, 1)
    assert ends(min_new_tokens=3) == (FinishReason.STOP, 4)
    assert ends(ignore_eos=True) == (FinishReason.LENGTH, 5)


def test_an_end_token_that_the_model_has_no_row_for_does_no_harm(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, eos_token_id=None, vocab_size=300)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|new|>"}))
    own = LLM(str(model), max_total_tokens=512, num_threads=1)
    assert min(own.tokenizer.eos_token_ids) >= 300
    params = [SamplingParams(temperature=0, max_tokens=5, min_new_tokens=least) for least in (0, 5)]
    assert [len(done.token_ids) for done in own.generate([[5, 6, 7]] * 2, params)] == [5, 5]


def test_the_end_of_a_turn_in_the_chat_template_ends_a_text(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, eos_token_id=None)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": "<|endoftext|>"})
    )
    own = LLM(str(model), max_total_tokens=512, num_threads=1)
    assert own.tokenizer.eos_token_ids == [0]
    done = own.chat(
        [{"role": "user", "content": "Hi"}],
        SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS_ID: 100.0}),
    )
    assert (done.finish_reason, done.text) == (FinishReason.STOP, "")
