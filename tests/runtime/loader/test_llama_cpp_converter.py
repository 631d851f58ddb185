"""Files that llama.cpp's own converter writes: the same model as the folder they are made from.

`LLAMA_CPP` names a folder with llama.cpp's `convert_hf_to_gguf.py` and what it imports. The
converter also needs the package sentencepiece.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from piecework import LLM, SamplingParams
from piecework.runtime.loader.loader import load_model
from tests.runtime.models.variants import VARIANTS, YARN
from tests.runtime.quantization.test_nvfp4 import make_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no llama.cpp"),
]
PROMPT = [(31 + 7 * j * j) % 500 for j in range(60)]
# The converter knows tokenizers by a hash, which none of a test has.
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
try:
    from conversion.base import TextModel
except ImportError:
    TextModel = None
script = sys.argv[1] + "/convert_hf_to_gguf.py"
sys.argv = [script, *sys.argv[2:]]
if TextModel is not None:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(script, run_name="__main__")
"""
# What GGUF does not hold, so that llama.cpp takes it for what it is in the published models, and
# what the converter needs.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    # The converter takes intermediate_size for the size of the state's inputs.
    "mamba2": {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "intermediate_size": 128},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "cohere": {"tie_word_embeddings": True, "use_qk_norm": False},
    "cohere2": {
        "tie_word_embeddings": True,
        "rotary_pct": 1.0,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "qwen2-moe": {"decoder_sparse_step": 1},
    "qwen3-moe": {"mlp_only_layers": []},
    "deepseek-v3": {
        "scoring_func": "sigmoid",
        "attention_bias": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "lfm2": {"conv_bias": False},
    "lfm2-moe": {"tie_word_embeddings": True},
    "falcon-h1": {"head_dim": 16},
}


# Others need tokens that a tiny tokenizer lacks, or have settings that GGUF does not hold.
CONVERTED = (
    *("llama", "llama-tied", "qwen2", "qwen3", "gpt-oss", "mamba2", "olmo2", "granite", "exaone4"),
    *("olmoe", "granitemoe", "seed-oss", "minimax-m2", "deepseek-v2", "deepseek-v3"),
    *("starcoder2", "smollm3", "qwen2-moe", "qwen3-moe", "lfm2", "lfm2-moe", "falcon-h1"),
    *("cohere", "cohere2"),
)


def converted(folder: Path, file: Path) -> Path:
    command = [sys.executable, "-c", CONVERT, os.environ["LLAMA_CPP"], str(folder)]
    done = subprocess.run(
        [*command, "--outfile", str(file), "--outtype", "f32"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return file


@pytest.mark.parametrize("writer", ["compressed", "modelopt"])
def test_a_converted_checkpoint_of_nvfp4_has_the_same_numbers(writer: str, tmp_path: Path) -> None:
    numbers, folder = make_pair(tmp_path, writer, "llama", hidden_size=128, intermediate_size=128)
    for file in numbers.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    cpu, paths = torch.device("cpu"), (numbers, converted(folder, tmp_path / "model.gguf"))
    wanted, found = (
        dict(load_model(str(path), torch.float32, cpu, False).named_parameters()) for path in paths
    )
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_says_what_the_folder_says(name: str, tmp_path: Path) -> None:
    kind, settings = VARIANTS[name]
    folder = make_tiny_model(tmp_path / "folder", kind, **settings | CHANGES.get(name, {}))
    file = converted(folder, tmp_path / "model.gguf")
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = wanted(torch.tensor([PROMPT])).logits[0]
    said = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    llm = LLM(str(file), dtype="float32", max_total_tokens=512, num_threads=1)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=0)
    (answer,) = llm.generate([PROMPT], params)
    found = [one.logprob for one in answer.prompt_logprobs or [] if one]
    assert found == pytest.approx(said.tolist(), abs=2e-3)
