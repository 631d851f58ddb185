"""The vision tower of Gemma 4."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, Stored

PROJECTOR_TYPES = ["gemma4v"]
_TOWER = "vision_tower"
_LAYER = f"{_TOWER}.encoder.layers.{{}}"
_SIDE = 3  # Patches that become one position, along each side, in the published models.
_POSITIONS = 280  # The most positions of an image in the published models.
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class OfFile(Projector):
    """A ViT with positions of two axes, whose linear layers may be clamped."""

    family = "gemma4"
    architecture = "Gemma4ForConditionalGeneration"
    model_type = "gemma4"
    text_type = "gemma4_text"
    text_kinds = ("gemma4",)
    output = ("mm.input_projection.weight", 0)
    names: ClassVar = {
        "mm.input_projection": "embed_vision.embedding_projection",
        "v.blk.{}.ln1": f"{_LAYER}.input_layernorm",
        "v.blk.{}.attn_post_norm": f"{_LAYER}.post_attention_layernorm",
        "v.blk.{}.ln2": f"{_LAYER}.pre_feedforward_layernorm",
        "v.blk.{}.ffn_post_norm": f"{_LAYER}.post_feedforward_layernorm",
        "v.blk.{}.attn_q_norm": f"{_LAYER}.self_attn.q_norm",
        "v.blk.{}.attn_k_norm": f"{_LAYER}.self_attn.k_norm",
    }
    # The layers that may be clamped.
    linears: ClassVar = {
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        "attn_out": "self_attn.o_proj",
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }

    def config(self) -> dict[str, Any]:
        heads: int = self.get("attention.head_count")
        vision = {
            "model_type": "gemma4_vision",
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self.get("feed_forward_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": self.shapes["v.blk.0.attn_q.weight"][0] // heads,
            "rms_norm_eps": self.get("attention.layer_norm_epsilon"),
            "patch_size": self.get("patch_size"),
            "pooling_kernel_size": self._side,
            "position_embedding_size": self.shapes["v.position_embd.weight"][1],
            "use_clipped_linears": "v.blk.0.attn_q.input_max" in self.shapes,
            "standardize": "v.std_scale" in self.shapes,
        }
        # See `models.gemma4`.
        is_small = self.text("embedding_length_per_layer_input", 0) > 0
        sees = None if is_small else "vision"
        return {
            "vision_config": vision,
            "audio_config": None,
            "text_config": {"use_bidirectional_attention": sees},
        }

    @property
    def _side(self) -> int:
        side: int = self.get("projector.scale_factor", _SIDE)
        return side

    def processor(self) -> dict[str, Any]:
        patch: int = self.get("patch_size")
        pixels: int = self.get("image_max_pixels", 0)
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": patch,
            "pooling_kernel_size": self._side,
            "max_soft_tokens": pixels // (patch * self._side) ** 2 or _POSITIONS,
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import changed

        # The converter makes a convolution of the first layer.
        stored[f"{_TOWER}.patch_embedder.input_proj.weight"] = changed(
            stored.pop("v.patch_embd.weight"), lambda values: values.permute(0, 2, 3, 1).flatten(1)
        )
        table = stored.pop("v.position_embd.weight")
        stored[f"{_TOWER}.patch_embedder.position_embedding_table"] = table
        for name in ("std_bias", "std_scale"):
            if f"v.{name}" in stored:
                stored[f"{_TOWER}.{name}"] = stored.pop(f"v.{name}")
        for layer in range(self.num_layers):
            for ours, theirs in self.linears.items():
                name, place = f"v.blk.{layer}.{ours}", f"{_LAYER.format(layer)}.{theirs}"
                stored[f"{place}.linear.weight"] = stored.pop(f"{name}.weight")
                for bound in _BOUNDS:
                    if f"{name}.{bound}" in stored:
                        number = stored.pop(f"{name}.{bound}")
                        stored[f"{place}.{bound}"] = changed(number, lambda values: values.view(()))
        return stored
