"""Tiny random Whisper models in Hugging Face's format, for tests. Their windows have 2 seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

WINDOW_SECONDS = 2
_POSITIONS = 50 * WINDOW_SECONDS
LANGUAGES = ("en", "de", "ja")
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
]


def make_tiny_whisper(folder: Path, *, english: bool = False, seed: int = 0) -> Path:
    """Write a model and return its folder. `english`: it knows one language and no tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
    end = names["<|endoftext|>"]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "WhisperTokenizer",
                **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
            }
        )
    )
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=names["<|notimestamps|>"] + 1 + _POSITIONS + 1,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=16,
        max_source_positions=_POSITIONS,
        max_target_positions=48,
        decoder_start_token_id=names["<|startoftranscript|>"],
        init_std=0.25,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), end),
    )
    model = WhisperForConditionalGeneration(config).eval()
    known = {
        "lang_to_id": {f"<|{each}|>": names[f"<|{each}|>"] for each in LANGUAGES},
        "task_to_id": {each: names[f"<|{each}|>"] for each in ("transcribe", "translate")},
    }
    model.generation_config = GenerationConfig(
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), end),
        decoder_start_token_id=names["<|startoftranscript|>"],
        no_timestamps_token_id=names["<|notimestamps|>"],
        prev_sot_token_id=names["<|startofprev|>"],
        is_multilingual=not english,
        **({} if english else known),
        suppress_tokens=[3, 7, *(names[name] for name in _SPECIAL[1:])],
        begin_suppress_tokens=[5, end],
        max_initial_timestamp_index=25,
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        max_length=48,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    return folder


def noise(seconds: float, seed: int = 0) -> bytes:
    """Return samples as the engine takes them: tones that change, and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(16_000 * seconds)) / 16_000
    tones = sum(
        np.sin(2 * np.pi * random.uniform(80, 4000) * times + random.uniform(0, 6))
        * (np.sin(2 * np.pi * random.uniform(0.3, 3) * times) > 0)
        for _ in range(6)
    )
    samples = 3000 * tones + 300 * random.standard_normal(len(times))
    return np.clip(samples, -32768, 32767).astype("<i2").tobytes()
