"""Tiny random models of images and text, with their image processors, and pictures."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from tokenizers import AddedToken, Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_GRIDS = [[height, width] for height in (32, 64, 96) for width in (32, 64)]
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# By family: how chat templates write an image, the tokens, members of config.json and of
# preprocessor_config.json.
_QWEN_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
_QWEN_SIZES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1600},
    **_HALVES,
}
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
Family = tuple[str, list[str], dict[str, Any], dict[str, Any]]


def _gemma4(sees: str | None, **experts: Any) -> Family:
    config = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "vision_config": {
            **_SIGLIP,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 300,
            "use_clipped_linears": sees is None,
            "standardize": sees is not None,
        },
        "audio_config": None,
        "text_config": {
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2 if sees is None else 0,
            "attention_k_eq_v": sees is not None,
            "num_global_key_value_heads": 1,
            "vocab_size_per_layer_input": 640,
            "hidden_size_per_layer_input": 16 if sees is None else 0,
            "use_bidirectional_attention": sees,
            "pad_token_id": 0,
            **experts,
        },
    }
    processor = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    return "<|image|>", ["<|image|>", "<|image>", "<image|>"], config, processor


FAMILIES: dict[str, Family] = {
    "idefics3": (
        "<image>",
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES],
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "vision_config": {**_SIGLIP, "image_size": 32, "patch_size": 8},
            "scale_factor": 2,
            "text_config": {"model_type": "llama"},
        },
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            **_HALVES,
        },
    ),
    "llava": (
        "<image>",
        ["<image>"],
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "model_type": "clip_vision_model",
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 32,
            },
            "text_config": {"model_type": "llama"},
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            **_HALVES,
        },
    ),
    "qwen2_vl": (
        _QWEN,
        _QWEN_TOKENS,
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vision_config": {**_QWEN_SIZES, "depth": 2, "embed_dim": 32, "hidden_size": 64},
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
        },
        _QWEN_PROCESSOR,
    ),
    "qwen2_5_vl": (
        _QWEN,
        _QWEN_TOKENS,
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": {
                **_QWEN_SIZES,
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
        },
        _QWEN_PROCESSOR,
    ),
    "qwen3_vl": (
        _QWEN,
        _QWEN_TOKENS,
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "vision_config": {
                **_QWEN_SIZES,
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            "text_config": {
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2]},
            },
        },
        _QWEN_PROCESSOR,
    ),
    "qwen3_5": (
        _QWEN,
        _QWEN_TOKENS,
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "vision_config": {
                **_QWEN_SIZES,
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
            },
            "text_config": {
                "head_dim": 32,
                "num_hidden_layers": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [3, 3, 2],
                },
            },
        },
        _QWEN_PROCESSOR,
    ),
    "gemma3": (
        "<start_of_image>",
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "image_size": 32,
                "patch_size": 4,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 16,
            "text_config": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            **_HALVES,
        },
    ),
    "llama4": (
        "<|image|>",
        [
            *("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ],
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "intermediate_size": 128,
                "image_size": 32,
                "patch_size": 8,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
                "vision_output_dim": 48,
            },
            "text_config": {
                "model_type": "llama4_text",
                "head_dim": 16,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 32,
            },
        },
        {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 4,
            **_HALVES,
        },
    ),
    **{name: _gemma4(sees) for name, sees in (("gemma4", None), ("gemma4-large", "vision"))},
    "gemma4-moe": _gemma4(
        "vision",
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "mistral3": (
        "[IMG]",
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "model_type": "pixtral",
                "head_dim": 16,
                "image_size": 64,
                "patch_size": 4,
            },
            "spatial_merge_size": 2,
            "text_config": {"model_type": "mistral", "head_dim": 16},
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 40},
            "patch_size": {"height": 4, "width": 4},
            **_HALVES,
        },
    ),
    "pixtral": (
        "[IMG]",
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "model_type": "pixtral",
                "head_dim": 16,
                "image_size": 64,
                "patch_size": 8,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "text_config": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 40},
            "patch_size": {"height": 8, "width": 8},
            **_HALVES,
        },
    ),
    "llava_onevision": (
        "<image>",
        ["<image>", "<video>"],
        {
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "model_type": "siglip_vision_model",
                "image_size": 32,
                "patch_size": 8,
                "vision_use_head": False,
            },
            "image_grid_pinpoints": _GRIDS,
            "vision_aspect_ratio": "anyres_max_2",
            "text_config": {"model_type": "qwen2"},
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": _GRIDS,
            **_HALVES,
        },
    ),
    "llava_next": (
        "<image>",
        ["<image>"],
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "vision_config": {
                **_SIGLIP,
                "model_type": "clip_vision_model",
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 32,
            },
            "image_grid_pinpoints": _GRIDS,
            "text_config": {"model_type": "llama"},
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": _GRIDS,
            **_HALVES,
        },
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        ["<IMG_CONTEXT>", "<img>", "</img>"],
        {
            "architectures": ["InternVLForConditionalGeneration"],
            "vision_config": {**_SIGLIP, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_seq_length": 4,
            "text_config": {"model_type": "qwen2"},
        },
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "max_patches": 3,
            **_HALVES,
        },
    ),
}


def make_tiny_vision(path: Path, family: str = "idefics3", **overrides: Any) -> Path:
    """Write the folder of a tiny model of `family`, with a chat template for images.

    `overrides` are members of its config.json; those of `text_config` are added.
    """
    placeholder, tokens, config, processor = FAMILIES[family]
    # The tokenizer does not depend on the model, and the config needs its ids.
    make_tiny_model(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    image_id = tokenizer.token_to_id(tokens[0])
    members = {"image_token_id": image_id, **config, **overrides}
    model_type = members.pop("model_type", family)
    if model_type.startswith(("llava", "llama4")):
        members["image_token_index"] = image_id
    if model_type == "llava_onevision":
        members["video_token_index"] = tokenizer.token_to_id(tokens[1])
    text = config["text_config"] | overrides.get("text_config", {})
    members["text_config"] = {"vocab_size": 640, **text}
    make_tiny_model(path, model_type, **members)
    _fill_zeros(path / "model.safetensors")
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("IMAGE", placeholder)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def make_slow_vision(path: Path) -> Path:
    """Write a tiny model whose encoder takes a while for an image of 240 x 240 pixels."""
    make_tiny_vision(path, "qwen2_5_vl")
    file = path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = 240 * 240
    file.write_text(json.dumps(settings))
    return path


def _fill_zeros(file: Path) -> None:
    """Give matrices that transformers starts at 0 random numbers."""
    tensors = load_file(file)
    chance = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.dim() > 1 and not tensor.any():
            tensor.normal_(0, 0.2, generator=chance)
    save_file(tensors, file, metadata={"format": "pt"})


def picture(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    """Return a random picture of smooth colours."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def picture_file(width: int = 48, height: int = 40, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the bytes of the file of a `picture`."""
    file = BytesIO()
    picture(width, height, seed).save(file, kind)
    return file.getvalue()
