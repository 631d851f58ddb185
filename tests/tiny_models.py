"""Tiny random models in Hugging Face's format, for tests: seconds to make, real in every part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown "
    "role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
_NORM_OR_BIAS = re.compile(r"(norm(_\w|s\.\d+)?|ln_\w+)\.weight$|(bias|correct_output_scale)$")
_TEXT = [
    "The quick brown fox jumps over the lazy dog. How many apples are left? Answer: 42.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Привет, мир! 你好,世界。",
]


def make_tiny_model(
    path: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a model folder; `overrides` are members of its config.json. Same arguments, same
    weights.
    """
    path.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        # Large enough that the next token is rarely a near tie.
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    if architecture == "qwen3":
        settings["head_dim"] = 32
    torch.manual_seed(seed)
    if "text_config" in overrides:
        # A model of images and text, whose text is of these sizes.
        settings = overrides | {"text_config": settings | overrides["text_config"]}
    else:
        settings |= overrides
    kind = CONFIGS.get(architecture)
    config = kind(**settings) if kind else AutoConfig.for_model(architecture, **settings)
    is_text = "text_config" not in settings
    kind_of_model = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = kind_of_model.from_config(config)
    for name, parameter in model.named_parameters():
        # transformers starts norms at 1 and biases at 0, which would hide that they are left out.
        if _NORM_OR_BIAS.search(name):
            # Gemma's and Qwen3-Next's stand at 0.
            less_one = architecture.startswith(("gemma", "qwen3_next", "qwen3_5"))
            less_one = less_one and not architecture.startswith(("gemma3n", "gemma4"))
            mean = float(not name.endswith("bias") and not less_one)
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    for name, buffer in model.named_buffers():
        # What is added to experts' scores, which starts at 0 too.
        if name.endswith("bias") and buffer.is_floating_point():
            torch.nn.init.normal_(buffer, std=0.3)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
    model.save_pretrained(path)
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[EOS_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
