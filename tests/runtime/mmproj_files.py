"""Writes tiny models of images and text as llama.cpp's converters do: a GGUF file with the text
model, and one with the vision tower (mmproj).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from converted_tensors import converted
from gguf_models import add_metadata, finish, metadata_of
from safetensors.torch import load_file
from transformers import AutoConfig

Arrays = dict[str, np.ndarray]
_ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2vl": gguf.MODEL_ARCH.QWEN2VL,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3vl": gguf.MODEL_ARCH.QWEN3VL,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "qwen35": gguf.MODEL_ARCH.QWEN35,
    "llama4": gguf.MODEL_ARCH.LLAMA4,
}
_TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")


class Kind(NamedTuple):
    """How a kind of projector is written.

    Attributes:
        overrides: Members of config.json that the GGUF files can express.
        text: `general.architecture` of the text model, and its metadata.
        metadata: Metadata of the tower beside those that all have.
        change: What the converter changes in the tower's tensors.
    """

    projector: str
    overrides: dict[str, Any]
    text: tuple[str, dict[str, Any]]
    metadata: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    change: Callable[[Arrays], Arrays] = lambda arrays: arrays


def _qwen(arrays: Arrays) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        if ".qkv." in name:
            for part, piece in zip("qkv", np.split(array, 3), strict=True):
                found[name.replace("qkv", part)] = piece
        elif "patch_embed.proj" in name:
            found["v.patch_embd.weight"] = array[:, :, 0]
            found["v.patch_embd.weight.1"] = array[:, :, 1]
        else:
            found[name] = array
    return found


def _qwen_metadata(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    is_first, windows = "embed_dim" in vision, vision.get("window_size")
    width = vision["embed_dim"] if is_first else vision["hidden_size"]
    return {
        "embedding_length": width,
        "feed_forward_length": 0 if is_first else vision["intermediate_size"],
        "block_count": vision["depth"],
        "attention.head_count": vision["num_heads"],
        "attention.layer_norm_epsilon": 1e-6,
        "image_size": 560,
        "patch_size": vision["patch_size"],
        "image_min_pixels": processor["size"]["shortest_edge"],
        "image_max_pixels": processor["size"]["longest_edge"],
        **({"n_wa_pattern": 2, "window_size": windows} if windows else {}),
    }


def _llava(arrays: Arrays) -> Arrays:
    """Leave out what LLaVA does not read: the last layer and the norm after it."""
    return {
        # The first layer of the projector has the number 0 in files, and the second one 2.
        name.replace("linear_1", "linear_0"): array
        for name, array in arrays.items()
        if ".layers.1." not in name and "post_layernorm" not in name
    }


def _llava_next(arrays: Arrays) -> Arrays:
    """Return what the surgery of LLaVA 1.6 and the converter of CLIP make of the tensors."""
    (name,) = (name for name in arrays if name.endswith("image_newline"))
    return {"model.image_newline": arrays[name]} | _llava(
        {other: array for other, array in arrays.items() if other != name}
    )


def _llama4(arrays: Arrays) -> Arrays:
    found = {}
    for name, array in arrays.items():
        if "multi_modal_projector" in name:
            # One layer, in spite of the number in its name.
            name = "mm.model.fc.weight"
        elif ".1.post_attention_layernorm." in name:
            # Published files have this name, and newer converters write another one.
            name = f"v.blk.1.ln2.{name.rpartition('.')[2]}"
        found[name.removeprefix("model.").replace("embedding_vlm", "embedding_vlm.weight")] = array
    return found


def _gemma(arrays: Arrays) -> Arrays:
    norm, projection = "mm_soft_emb_norm.weight", "mm_input_projection"
    return {
        name.replace(f"{projection}_weight", f"{projection}.weight"): array + 1.0
        if name.endswith(norm)
        else array
        for name, array in arrays.items()
    }


def _pixtral(arrays: Arrays) -> Arrays:
    """Sort the rows of queries and keys into pairs, and add the row of a token."""
    heads, found = 2, dict(arrays)
    for name, array in arrays.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2)
            found[name] = pairs.reshape(array.shape)
    return {**found, "v.token_embd.img_break": np.zeros(64, np.float32)}


_INTERNVL = {
    r"^vision_tower\.embeddings\.cls_token": "v.class_embd",
    r"^vision_tower\.embeddings\.position_embeddings": "v.position_embd.weight",
    r"^multi_modal_projector\.layer_norm": "mlp1.0",
    r"^multi_modal_projector\.linear_1": "mlp1.1",
    r"^multi_modal_projector\.linear_2": "mlp1.3",
    r"(lambda_[12])$": r"\1.weight",
    r"^vision_tower\.": "model.vision_tower.",
}


def _internvl(arrays: Arrays) -> Arrays:
    found = {}
    for name, array in arrays.items():
        for pattern, replacement in _INTERNVL.items():
            name = re.sub(pattern, replacement, name)
        found[name] = array
    return found


def _qwen3(arrays: Arrays) -> Arrays:
    found: Arrays = {}
    merger = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
    for name, array in arrays.items():
        *_, part, kind = name.split(".")
        if "deepstack_merger_list" in name:
            # The mergers follow the layers 0 and 1.
            layer = name.split(".")[-3]
            found[f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{kind}"] = array
        elif "visual.merger" in name:
            found[f"{merger[part]}.{kind}"] = array
        elif "patch_embed.proj.weight" in name:
            found["v.patch_embd.weight"] = array[:, :, 0]
            found["v.patch_embd.weight.1"] = array[:, :, 1]
        else:
            found[name.removeprefix("model.")] = array
    return found


def _gemma4(arrays: Arrays) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
        name = name.replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            name += ".weight"
        if name.endswith("input_proj.weight"):
            array = array.reshape(len(array), 4, 4, 3).transpose(0, 3, 1, 2)
        if "embed_vision" in name:
            name = "mm.input_projection.weight"
        found[name] = array[None] if array.ndim == 0 else array
    return found


def _gemma4_text(*, is_large: bool) -> dict[str, Any]:
    return {
        "feed_forward_length": 96,
        "attention.key_length": 32,
        "attention.key_length_swa": 16,
        "attention.head_count_kv": [2, 2, 1 if is_large else 2] * 2,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [True, True, False] * 2,
        "attention.shared_kv_layers": 0 if is_large else 2,
        "embedding_length_per_layer_input": 0 if is_large else 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }


def _of_pixtral(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    sizes = {"image_size": processor["size"]["longest_edge"]}
    merge = config.get("spatial_merge_size")
    return sizes if merge is None else {**sizes, "spatial_merge_size": merge}


_SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}
KINDS = {
    "idefics3": Kind(
        "idefics3",
        {},
        ("llama", {}),
        lambda config, processor: {
            "projector.scale_factor": config["scale_factor"],
            "preproc_image_size": processor["size"]["longest_edge"],
        },
    ),
    "gemma3": Kind(
        "gemma3",
        {},
        ("gemma3", {"attention.sliding_window": 24, "rope.freq_base": 1e6}),
        lambda *_: {"projector.scale_factor": 2},
        _gemma,
    ),
    "qwen2_vl": Kind("qwen2vl_merger", {}, ("qwen2vl", _SECTIONS), _qwen_metadata, _qwen),
    "qwen2_5_vl": Kind("qwen2.5vl_merger", {}, ("qwen2vl", _SECTIONS), _qwen_metadata, _qwen),
    "qwen3_vl": Kind(
        "qwen3vl_merger",
        {},
        ("qwen3vl", {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 2}),
        lambda config, processor: {
            **_qwen_metadata(config, processor),
            "is_deepstack_layers": [True, True, False],
        },
        _qwen3,
    ),
    "qwen3_5": Kind(
        "qwen3vl_merger",
        {"text_config": {"linear_key_head_dim": 24}},
        (
            "qwen35",
            {
                "ssm.conv_kernel": 4,
                "ssm.state_size": 24,
                "ssm.group_count": 2,
                "ssm.time_step_rank": 4,
                "ssm.inner_size": 64,
                "full_attention_interval": 4,
                "rope.dimension_count": 16,
                "rope.dimension_sections": [3, 3, 2, 0],
            },
        ),
        _qwen_metadata,
        _qwen3,
    ),
    **{
        name: Kind(
            "gemma4v",
            {},
            ("gemma4", _gemma4_text(is_large=name == "gemma4-large")),
            lambda *_: {
                "feed_forward_length": 48,
                "image_size": 224,
                "projector.scale_factor": 2,
                "image_max_pixels": 70 * 8 * 8,
            },
            _gemma4,
        )
        for name in ("gemma4", "gemma4-large")
    },
    "pixtral": Kind("pixtral", {}, ("llama", {}), _of_pixtral, _pixtral),
    "mistral3": Kind("pixtral", {}, ("llama", {}), _of_pixtral, _pixtral),
    "internvl": Kind(
        "internvl",
        {},
        ("qwen2", {}),
        lambda config, processor: {
            "projector.scale_factor": 2,
            "image_size": 32,
            "patch_size": 8,
            "preproc_max_tiles": processor["max_patches"],
        },
        _internvl,
    ),
    "llava": Kind(
        "mlp", {}, ("llama", {}), lambda *_: {"block_count": 1, "feature_layer": [1]}, _llava
    ),
    "llava_next": Kind(
        "mlp",
        {},
        ("llama", {}),
        lambda config, _: {
            "block_count": 1,
            "image_grid_pinpoints": [
                side for grid in config["image_grid_pinpoints"] for side in grid
            ],
            "mm_patch_merge_type": "spatial_unpad",
        },
        _llava_next,
    ),
    "llama4": Kind(
        "llama4",
        # Files do not hold the size of chunks.
        {"text_config": {"attention_chunk_size": 8192}},
        (
            "llama4",
            {
                "feed_forward_length": 96,
                "expert_count": 4,
                "expert_used_count": 1,
                "expert_feed_forward_length": 96,
                "interleave_moe_layer_step": 1,
            },
        ),
        lambda config, processor: {
            "projector.scale_factor": 2,
            "preproc_max_tiles": processor["max_patches"],
        },
        _llama4,
    ),
}


def write_files(folder: Path, family: str, out: Path) -> Path:
    """Write the files of a tiny model of a family. Return the path of the text model."""
    kind = KINDS[family]
    config = json.loads((folder / "config.json").read_text())
    arrays = {
        name: tensor.float().numpy()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    is_tower = {name: name.startswith(_OF_TOWER) for name in arrays}
    text = {
        _TEXT.sub("model.", name).replace("model.lm_head", "lm_head"): arrays[name]
        for name in arrays
        if not is_tower[name]
    }
    _write_text(folder, text, kind, out / "tiny.gguf")
    tower = {name: arrays[name] for name in arrays if is_tower[name]}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    _write_tower(config, processor, kind.change(tower), kind, out / "mmproj-tiny-f32.gguf")
    return out / "tiny.gguf"


_OF_TOWER = (
    *("vision_model", "image_newline", "model.image_newline", "model.multi_modal"),
    *("vision_tower", "model.vision_model", "model.connector", "multi_modal", "visual."),
    *("model.visual.", "model.vision_tower", "model.embed_vision"),
)


def _apart(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors with those of the experts of Llama 4 transposed, and cut into two."""
    for name, array in arrays.items():
        before, _, projection = name.rpartition(".")
        if projection == "gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=-1), strict=True):
                yield f"{before}.{part}_proj.weight", half.swapaxes(1, 2)
        elif projection == "down_proj":
            yield f"{name}.weight", array.swapaxes(1, 2)
        else:
            yield name, array


def _write_text(folder: Path, arrays: Arrays, kind: Kind, path: Path) -> None:
    architecture, extra = kind.text
    config = AutoConfig.from_pretrained(folder).get_text_config()
    writer = gguf.GGUFWriter(path, architecture)
    values = {key.replace("__", "."): value for key, value in metadata_of(config).items()}
    for key, value in {**values, **extra}.items():
        add_metadata(writer, f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(_ARCHES[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = (
        (name, tensor.numpy())
        for stored, array in _apart(arrays)
        for name, tensor in converted(stored, torch.from_numpy(array), architecture)
    )
    for name, array in tensors:
        count = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        if count is not None:
            pairs = array.reshape(count, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = np.ascontiguousarray(pairs.reshape(array.shape))
        is_less_one = architecture in ("gemma3", "qwen35") and "linear_attn.norm" not in name
        if is_less_one and name.endswith("norm.weight"):
            array = array + np.float32(1.0)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(ours or name, np.ascontiguousarray(array))
    finish(writer)


def _write_tower(
    config: dict[str, Any], processor: dict[str, Any], arrays: Arrays, kind: Kind, path: Path
) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", kind.projector)
    writer.add_bool("clip.has_vision_encoder", True)
    vision = config["vision_config"]
    of_clip = {
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision.get("intermediate_size"),
        "block_count": vision.get("num_hidden_layers"),
        "attention.head_count": vision.get("num_attention_heads"),
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "image_size": vision.get("image_size"),
        "patch_size": vision["patch_size"],
        "image_mean": processor.get("image_mean", [0.0] * 3),
        "image_std": processor.get("image_std", [1.0] * 3),
    }
    for key, value in {**of_clip, **kind.metadata(config, processor)}.items():
        add_metadata(writer, f"clip.vision.{key}", value)
    for name, array in _named(arrays):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    finish(writer)


def quantize_tower(path: Path) -> int:
    """Store the matrices of linear layers of a tower as Q8_0. Return how many there are."""
    reader, kind = gguf.GGUFReader(path), gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "clip")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    found = 0
    for tensor in reader.tensors:
        is_linear = len(tensor.shape) == 2 and "position" not in tensor.name
        if is_linear and tensor.shape[0] % 32 == 0:
            data = gguf.quants.quantize(tensor.data, kind)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
            found += 1
        else:
            writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    path.with_suffix(".new").replace(path)
    return found


def _named(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for name, array in arrays.items():
        # The names of checkpoints of today's transformers lack a module of the published ones.
        known = re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
        suffixes = (".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max")
        ours = names.get_name(name, suffixes) or names.get_name(known, suffixes)
        assert ours is not None or name.startswith(("v.", "mm.")), name
        yield ours or name, array
