"""What a kind of projector in GGUF files differs in.

A kind is a file of this room that states llama.cpp's names of it (`clip.projector_type`), and has
a class:

    PROJECTOR_TYPES = ["idefics3"]

    class OfFile(Projector):
        family = "idefics3"                          # the file of runtime/multimodal
        text_kinds = ("llama",)                      # `general.architecture` of text models
        def config(self): ...                        # config.json
        def processor(self): ...                     # preprocessor_config.json
        names = vit_names("vision_model") | {...}    # modules of transformers' model

Source of the names and of what converters change: llama.cpp's tools/mtmd/clip.cpp and conversion/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...files.gguf_reader import FastGGUFReader, metadata

if TYPE_CHECKING:
    from ...layers.linear import StoredTensor

Stored = dict[str, "StoredTensor"]


def vit_names(tower: str) -> dict[str, str]:
    """Return the names of modules in GGUF files, and in a tower of CLIP or SigLIP."""
    layer = f"{tower}.encoder.layers.{{}}"
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
        "v.blk.{}.ln1": f"{layer}.layer_norm1",
        "v.blk.{}.ln2": f"{layer}.layer_norm2",
        "v.blk.{}.attn_q": f"{layer}.self_attn.q_proj",
        "v.blk.{}.attn_k": f"{layer}.self_attn.k_proj",
        "v.blk.{}.attn_v": f"{layer}.self_attn.v_proj",
        "v.blk.{}.attn_out": f"{layer}.self_attn.out_proj",
        "v.blk.{}.ffn_up": f"{layer}.mlp.fc1",
        "v.blk.{}.ffn_down": f"{layer}.mlp.fc2",
    }


class Projector:
    """The base class of kinds.

    `reader` is that of the file with the tower, and `text` that of the text model.
    """

    family: str
    architecture: str
    model_type: str
    # The `model_type` of the text model, which is needed for its width alone.
    text_type: str
    text_kinds: ClassVar[tuple[str, ...]]
    # The tensor that makes embeddings of the text model, and which of its dimensions they are.
    output: ClassVar[tuple[str, int]]
    # Names of modules without ".weight" and ".bias". {} is the number of a layer.
    names: ClassVar[Mapping[str, str]]

    def __init__(self, reader: FastGGUFReader, text: FastGGUFReader) -> None:
        self.reader = reader
        self.text_kind: str = metadata(text, "general.architecture", "")
        self._text = text
        self.shapes = {
            tensor.name: tuple(int(size) for size in reversed(tensor.shape))
            for tensor in reader.tensors
        }

    def why_unfit(self) -> str | None:
        """Return why the tower does not fit the text model, or None if it does."""
        if self.text_kind not in self.text_kinds:
            kinds = " or ".join(self.text_kinds)
            return f"it is for a text model of the kind {kinds}, not {self.text_kind}"
        name, dimension = self.output
        if name not in self.shapes:
            return f"it has no tensor {name}"
        width = self.shapes[name][dimension]
        if width != self.text_width:
            return (
                f"its embeddings have {width} numbers, and those of the text model "
                f"{self.text_width}"
            )
        return None

    @property
    def text_width(self) -> int:
        """Numbers of an embedding of the text model."""
        return int(self.text("embedding_length", 0))

    def get(self, key: str, default: Any = None) -> Any:
        """Return `clip.vision.<key>`. Raise `ValueError` if it is needed and missing."""
        found = metadata(self.reader, f"clip.vision.{key}", default)
        if found is None:
            raise ValueError(f"{self.reader.path} has no clip.vision.{key}; download it again")
        return found

    def text(self, key: str, default: Any = None) -> Any:
        """Return metadata of the text model."""
        return metadata(self._text, f"{self.text_kind}.{key}", default)

    @property
    def num_layers(self) -> int:
        """Number of layers of which the file has tensors."""
        numbers = [name.split(".")[2] for name in self.shapes if name.startswith("v.blk.")]
        return 1 + max(map(int, numbers), default=-1)

    def vit(self) -> dict[str, Any]:
        """Return members of `vision_config` of a tower of CLIP or SigLIP."""
        return {
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self.get("feed_forward_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.get("attention.head_count"),
            "image_size": self.get("image_size"),
            "patch_size": self.get("patch_size"),
            "layer_norm_eps": self.get("attention.layer_norm_epsilon"),
        }

    def activation(self, default: str) -> str:
        """Return `hidden_act` of the tower."""
        for key, name in (("clip.use_gelu", "gelu"), ("clip.use_silu", "silu")):
            if metadata(self.reader, key, default=False):
                return name
        return default

    def colours(self) -> dict[str, Any]:
        """Return how an image processor normalises colours."""
        return {"image_mean": self.get("image_mean"), "image_std": self.get("image_std")}

    def members(self) -> dict[str, Any]:
        """Return the content of config.json."""
        config = self.config()
        text = {
            "model_type": self.text_type,
            "hidden_size": self.text_width,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            **config.get("text_config", {}),
        }
        names = {"model_type": self.model_type, "architectures": [self.architecture]}
        return {**names, **config, "text_config": text}

    def config(self) -> dict[str, Any]:
        """Return members of config.json, without those of the text model."""
        raise NotImplementedError

    def processor(self) -> dict[str, Any]:
        """Return the content of preprocessor_config.json."""
        raise NotImplementedError

    def change(self, stored: Stored) -> Stored:
        """Return the tensors by GGUF names with the values and shapes of transformers' modules."""
        return stored

    def tensors(self) -> Sequence[StoredTensor]:
        """Return the tensors by the names of transformers' modules."""
        # Imported here, because the process of the server has no torch.
        from ...loader.gguf_names import checkpoint_name
        from .stored import stored_tensors

        names = dict(self.names)
        return [
            tensor._replace(name=checkpoint_name(name, names))
            for name, tensor in self.change(stored_tensors(self.reader)).items()
        ]
