"""Models that transformers' own code computes: what is chosen, what is refused, and that its linear
layers are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from piecework import LLM, SamplingParams
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.model_registry import FALLBACK, ModelCode
from piecework.runtime.loader.check import check_model
from piecework.runtime.loader.loader import load_model
from piecework.runtime.loader.parallel import Shard
from piecework.runtime.quantization.methods import linear_kinds
from tests.runtime.models.sizes import FALCON, LLAMA4
from tests.runtime.models.variants import FALLBACKS

AUTO, THEIRS = ModelCode("auto"), ModelCode("transformers")
PROMPT = [(31 + 7 * j * j) % 500 for j in range(40)]


def save(path: Path, kind: str, **settings: Any) -> Path:
    """A random model of transformers, as small as its config allows."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(path)
    return path


def test_ours_computes_what_is_ours_unless_told_otherwise(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    assert ModelConfig.from_pretrained(path, code=AUTO).architecture == "LlamaForCausalLM"
    assert ModelConfig.from_pretrained(path, code=THEIRS).architecture == FALLBACK


def test_both_say_the_same_of_a_llama(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, prompt_logprobs=0)
    said = []
    for impl in ("piecework", "transformers"):
        llm = LLM(str(path), dtype="float32", max_total_tokens=512, model_impl=impl, num_threads=1)
        (done,) = llm.generate([PROMPT], params)
        said.append((done.token_ids, [one.logprob for one in done.prompt_logprobs or [] if one]))
    assert said[0][0] == said[1][0]
    assert said[0][1] == pytest.approx(said[1][1], abs=1e-4)


def test_its_linear_layers_are_quantised_on_load(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "olmo")
    model = load_model(
        str(path), torch.float32, torch.device("cpu"), False, quantization="int8", code=AUTO
    )
    kinds = linear_kinds(model)
    assert "model.layers.0.self_attn.q_proj" in kinds and "lm_head" in kinds


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "olmo", tie_word_embeddings=True)
    model: Any = load_model(str(path), torch.float32, torch.device("cpu"), False, code=AUTO)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (
            "mpt",
            {
                "vocab_size": 64,
                "hidden_size": 16,
                "n_layers": 1,
                "n_heads": 2,
                "attn_config": {"alibi": False},
            },
            "alibi False is not supported; choose another model",
        ),
        (
            "recurrent_gemma",
            {
                "vocab_size": 64,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "lru_width": 16,
            },
            "choose another model",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    kind: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = save(tmp_path, kind, **settings)
    with pytest.raises(ValueError, match=why) as refused:
        ModelConfig.from_pretrained(path, code=AUTO)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("falcon_h1", FALCON, "keeps a state beside its attention"),
        ("llama4_text", LLAMA4, "by their mask alone"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 24}, "by their mask alone"),
        ("doge", {}, "attends otherwise than to all before a token"),
    ],
)
def test_what_is_more_than_attention_of_all_before_is_refused(
    kind: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """Each layer of these asks the interface, and would be answered wrongly."""
    path = make_tiny_model(tmp_path, kind, **settings)
    with pytest.raises(ValueError, match=why):
        ModelConfig.from_pretrained(path, code=THEIRS)


@pytest.mark.parametrize("count", [0, 10**6])
def test_layers_that_no_model_has_are_refused_before_they_are_made(
    count: int, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, "olmo")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": count}))
    with pytest.raises(ValueError, match=r"num_hidden_layers must be 0 to|0 of 0 layers"):
        ModelConfig.from_pretrained(path, code=AUTO)


def test_code_of_the_folder_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    content = json.loads((path / "config.json").read_text())
    content |= {
        "architectures": ["TheirsForCausalLM"],
        "model_type": "theirs",
        "auto_map": {
            "AutoConfig": "theirs.TheirsConfig",
            "AutoModelForCausalLM": "theirs.TheirsForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(content))
    ran = tmp_path / "ran"
    (path / "theirs.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class TheirsConfig(LlamaConfig):\n    model_type = 'theirs'\n"
        "class TheirsForCausalLM(LlamaForCausalLM):\n    config_class = TheirsConfig\n"
    )
    with pytest.raises(ValueError, match="add --trust-remote-code if you trust it"):
        ModelConfig.from_pretrained(path, code=AUTO)
    assert not ran.exists()
    config = ModelConfig.from_pretrained(path, code=AUTO._replace(trusted=True))
    assert ran.exists() and config.architecture == FALLBACK
    load_model(
        str(path),
        torch.float32,
        torch.device("cpu"),
        False,
        code=AUTO._replace(trusted=True),
    )


@pytest.mark.parametrize(
    ("members", "ranks", "why"),
    [
        ({}, 2, "run on one rank; leave --tp-size out"),
        ({"quantization_config": {"quant_method": "gptq"}}, 1, "take a checkpoint of 16 bits"),
        ({"is_encoder_decoder": True}, 1, "an encoder with a decoder"),
    ],
)
def test_what_is_ours_alone_is_refused_before_torch(
    members: dict[str, Any], ranks: int, why: str, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, "olmo")
    content = json.loads((path / "config.json").read_text()) | members
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=why):
        check_model(str(path), context_length=None, weights=True, ranks=ranks, code=AUTO)


def test_a_gguf_file_is_not_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="takes folders"):
        check_model(str(tmp_path / "model.gguf"), context_length=None, weights=True, code=THEIRS)


def test_without_the_fallback_other_architectures_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "olmo")
    with pytest.raises(ValueError, match="'OlmoForCausalLM' is not supported; supported: "):
        check_model(str(path), context_length=None, weights=True, code=ModelCode("piecework"))


def test_weights_are_read_one_by_one_where_the_files_call_them_as_the_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path, "olmo", tie_word_embeddings=True)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    model = load_model(str(path), torch.float32, torch.device("cpu"), False, code=AUTO)
    held = dict(model.named_parameters())
    assert held and all(torch.equal(each, whole[name]) for name, each in held.items())


def test_what_our_own_code_of_a_model_refuses_goes_to_transformers(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=2.0)
    config = ModelConfig.from_pretrained(path, code=AUTO)
    assert config.architecture == FALLBACK
    with pytest.raises(ValueError, match="clip_qkv is not supported"):
        ModelConfig.from_pretrained(path, code=ModelCode("piecework"))
    with pytest.raises(ValueError, match="run on one rank; leave --tp-size out"):
        load_model(
            str(path), torch.float32, torch.device("cpu"), False, code=AUTO, shard=Shard(0, 2)
        )
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    llm = LLM(str(path), dtype="float32", max_total_tokens=512, num_threads=1)
    (done,) = llm.generate([PROMPT], params)
    with torch.inference_mode():
        said = wanted(torch.tensor([PROMPT + done.token_ids])).logits[0].argmax(-1)
    assert done.token_ids == said[len(PROMPT) - 1 : -1].tolist()


def test_a_llama_of_another_type_is_one_where_its_members_are_llamas(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama")
    plain = ModelConfig.from_pretrained(path)
    content = json.loads((path / "config.json").read_text())

    def config(**changes: object) -> ModelConfig:
        (path / "config.json").write_text(json.dumps(content | changes))
        check_model(str(path), context_length=None, weights=True, ranks=1, code=AUTO)
        return ModelConfig.from_pretrained(path, code=AUTO)

    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    assert config(**own, qkv_bias=False, clip_qkv=None) == plain
    with pytest.raises(ValueError, match="code of its own; add --trust-remote-code"):
        config(**own, clip_qkv=2.0)
    assert config(model_type="helium").architecture == FALLBACK
    with pytest.raises(ValueError, match='goes with "model_type": "llama", got \'qwen3\''):
        config(model_type="qwen3")
    with pytest.raises(ValueError, match="got \\['own'\\]"):
        config(model_type=["own"])


def test_a_conversion_keeps_the_numbers_of_the_files_whatever_config_json_says(
    tmp_path: Path,
) -> None:
    path = make_tiny_model(tmp_path, "dots1", **FALLBACKS["dots1"][1])
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"dtype": "bfloat16"}))
    model = load_model(str(path), torch.float32, torch.device("cpu"), False, code=AUTO)
    held = dict(model.named_parameters())
    assert held and all(torch.equal(each, whole[name]) for name, each in held.items())
