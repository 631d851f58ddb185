"""Loads heads that draft tokens: layers of the model's own checkpoint, or a folder of EAGLE-3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.linear import LinearKernels
from ..config.engine import EngineConfig
from ..config.model import ModelConfig
from ..config.model_registry import model_class
from ..config.quantization_registry import asked_of
from ..config.speculation import HEADS
from ..files.folder import read_json
from ..files.resolve import resolve_model_path
from ..layers.decoder import Decoder
from ..layers.linear import StoredTensor
from ..models.causal_lm import CausalLM
from ..models.checkpoint import renamed
from ..models.draft_head import DraftHead
from ..models.eagle3 import ARCHITECTURES, STATES, Eagle3
from ..models.next_layer import SHARED, NextLayer
from ..quantization.methods import Kinds, Products, scheme_kinds
from . import safetensors
from .loader import fill, finish, make_empty, scheme_of

_EAGLE3 = "--speculative-draft-model-path"
_NEXTN = "--speculative-algorithm nextn"


class Placement(NamedTuple):
    """How weights are kept. See the arguments of `load_model`."""

    dtype: torch.dtype
    device: torch.device
    kernels: LinearKernels | None
    lacking: Collection[torch.dtype] = ()
    progress: bool = False

    def build(self, make: Any, tensors: list[StoredTensor], path: str, kinds: Any) -> Any:
        head = make_empty(make, self.dtype, self.device, kinds)
        fill(head, tensors, path, progress=self.progress)
        finish(head, self.kernels, progress=self.progress)
        return head


def load_head(
    path: str, config: EngineConfig, model: CausalLM, placement: Placement, *, progress: bool
) -> DraftHead | None:
    """Return the head that `--speculative-algorithm` names, or None.

    Raise `ValueError` with a remedy if there is no such head for `model`.
    """
    if config.speculative_algorithm not in HEADS:
        return None
    placement = placement._replace(progress=progress)
    flag = f"--speculative-algorithm {config.speculative_algorithm}"
    if config.load_format == "dummy":
        raise ValueError(f"{flag} needs the weights of the head: leave --load-format dummy out")
    head = (
        load_next_layer(path, model, placement, config.quantization)
        if config.speculative_draft_model_path is None
        else load_eagle3(config.speculative_draft_model_path, model, placement)
    )
    head.number_layers(len(model.kv_layers))
    return head


def load_next_layer(
    path: str, model: CausalLM, placement: Placement, quantization: str
) -> DraftHead:
    """Return the layer of a checkpoint that predicts one token more than `model`.

    Raise `ValueError` if the checkpoint has none that is supported.
    """
    kind, layer = type(model), model.config.num_layers
    if not getattr(kind, "has_next_layer", False):
        raise ValueError(
            f"{_NEXTN}: no layer that predicts further tokens is known for "
            f"{model.config.architecture}; take auto"
        )
    if Path(path).suffix == ".gguf":
        raise ValueError(
            f"{_NEXTN} reads the layer from a folder of safetensors, but {path} is a .gguf file; "
            "take auto"
        )
    content = read_json(Path(path, "config.json"))
    scheme = scheme_of(Path(path))
    found = safetensors.list_tensors(Path(path), quantized=scheme is not None)
    deeper = replace(model.config, num_layers=layer + 1)
    prefix = f"model.layers.{layer}."
    own = [
        tensor._replace(name=tensor.name.removeprefix(prefix))
        for tensor in model_class(model.config.architecture).checkpoint_tensors(deeper, found)
        if tensor.name.startswith(prefix)
    ]
    if not own:
        raise ValueError(
            f"{_NEXTN}: {path} holds no tensors {prefix}*, the layer that predicts further tokens: "
            "download a checkpoint with it, or take auto"
        )
    names = {
        **{rf"^{name}\..*": "" for name in SHARED},
        r"^shared_head\.norm\.": "norm.",
        r"^(enorm|hnorm|eh_proj)\.": r"\1.",
        "^": "layer.",
    }

    def stored_scheme(name: str) -> str:
        assert scheme is not None
        return scheme(prefix + name.removeprefix("layer."))

    def kinds(head: Any) -> Kinds:
        products = Products(*placement[:4])
        asked = asked_of(path, quantization, content)
        return scheme_kinds(head, None if scheme is None else stored_scheme, asked, products)

    if kind.next_layer_reads_sums:
        _keep_states(model, [layer])
    made: DraftHead = placement.build(lambda: NextLayer(model), renamed(own, names), path, kinds)
    return made


def load_eagle3(name: str, model: CausalLM, placement: Placement) -> DraftHead:
    """Return the EAGLE-3 head of a folder, and have `model` give the hidden states that it reads.

    Raise `ValueError` if the folder holds no such head, or one of another model.
    """
    path = resolve_model_path(name)
    try:
        return _load_eagle3(Path(path), model, placement)
    except ValueError as error:
        raise ValueError(f"{_EAGLE3} {name}: {error}") from None


def _load_eagle3(folder: Path, model: CausalLM, placement: Placement) -> DraftHead:
    content = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    architectures = content.get("architectures") if isinstance(content, dict) else None
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        raise ValueError(
            f"its config.json must have the architecture {' or '.join(ARCHITECTURES)}, got "
            f"{architectures!r:.80}: take a folder with a head of EAGLE-3, or leave "
            "--speculative-algorithm eagle3 out for a draft model"
        )
    config: Any = ModelConfig.from_pretrained(folder, architecture="LlamaForCausalLM")
    own, size = model.config, model.config.hidden_size
    if config.num_layers != 1:
        raise ValueError(f"it has {config.num_layers} layers, but only one is supported")
    if config.vocab_size != own.vocab_size:
        raise ValueError(
            f"its vocabulary has {config.vocab_size} tokens and the model's {own.vocab_size}: take "
            "the head that was made for this model"
        )
    draft_vocab = content.get("draft_vocab_size") or config.vocab_size
    found = {
        tensor.name.removeprefix("model."): tensor
        # d2t and t2d are whole numbers and flags, which only quantised checkpoints may hold.
        for tensor in safetensors.list_tensors(folder, quantized=True)
    }
    found.pop("t2d", None)
    targets = found.pop("d2t", None)
    reads = found["fc.weight"].shape[-1] if "fc.weight" in found else STATES * size
    if reads != STATES * size:
        raise ValueError(
            f"it reads {STATES} hidden states of {reads // STATES} numbers, but the model's have "
            f"{size}: take the head that was made for this model"
        )
    own_embedding, own_head = "embed_tokens.weight" in found, "lm_head.weight" in found
    if config.hidden_size != size and not (own_embedding and own_head):
        raise ValueError(
            f"its states have {config.hidden_size} numbers and the model's {size}, so it needs "
            "embed_tokens.weight and lm_head.weight of its own: download the head again"
        )
    if not own_head and draft_vocab != own.vocab_size:
        raise ValueError("it lacks lm_head.weight: download the head again")
    kept = _kept_layers(content, own.num_layers)
    _keep_states(model, kept)
    tensors = [tensor._replace(name=name) for name, tensor in found.items()]

    def make() -> Eagle3:
        return Eagle3(config, model, draft_vocab, own_embedding=own_embedding, own_head=own_head)

    head: Eagle3 = placement.build(make, tensors, str(folder), lambda _: {})
    if targets is not None:
        if targets.shape != (draft_vocab,):
            raise ValueError(
                f"d2t has the shape {list(targets.shape)}, but the head's vocabulary has "
                f"{draft_vocab} tokens: download the head again"
            )
        # The file holds differences.
        numbers = targets.read().long() + torch.arange(draft_vocab)
        if not bool(((numbers >= 0) & (numbers < own.vocab_size)).all()):
            raise ValueError(
                f"d2t names tokens beyond the model's {own.vocab_size}: take the head that was "
                "made for this model"
            )
        head.targets = numbers.to(placement.device)
    elif draft_vocab != own.vocab_size:
        raise ValueError("it lacks d2t, the model's numbers of its tokens: download the head again")
    return head


def _kept_layers(content: dict[str, Any], layers: int) -> list[int]:
    """Return the layers whose inputs the head reads.

    EAGLE-3's own are the third, the middle one and the third last. `eagle_config` may name others,
    by the layers whose outputs they are.
    """
    said = content.get("eagle_config")
    named = said.get("eagle_aux_hidden_state_layer_ids") if isinstance(said, dict) else None
    kept = sorted({2, layers // 2, layers - 3})
    if isinstance(named, list) and named and all(type(layer) is int for layer in named):
        kept = sorted({layer + 1 for layer in named})
    if len(kept) != STATES or not 0 <= kept[0] <= kept[-1] < layers:
        raise ValueError(
            f"it reads {STATES} inner layers, which a model of {layers} layers does not have: take "
            "the head that was made for this model"
        )
    return kept


def _keep_states(model: CausalLM, layers: list[int]) -> None:
    """Have the model append the inputs of `layers` to its hidden states."""
    decoder: Any = model.model
    if type(decoder).forward is not Decoder.forward:
        raise ValueError(
            f"{model.config.architecture} has a decoder of its own, which gives no hidden states "
            "of inner layers: take a draft model"
        )
    decoder.kept_layers = layers
    model.config = replace(model.config, kept_layers=layers)
