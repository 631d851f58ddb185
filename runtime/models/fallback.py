"""Models that the code of transformers computes, with the attention, cache and linear layers of
this package.

The code of a model gets its attention from `AttentionInterface` of transformers, which returns
`piecework::attention`. Before that, a forward on the meta device records how attention is called.
From this follows what each layer keeps of a token.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from ...kernels.attention import KVLayout
from ..config.model import ModelConfig
from ..layers.attention import attention
from ..layers.linear import StoredTensor
from .causal_lm import CausalLM
from .transformers_build import ATTENTION, build, own_layers

logger = logging.getLogger(__name__)

_NOTES = "piecework_notes"
_NAME = "_piecework_name"
_LAYER = "_piecework_layer"  # Attribute of the modules that attend.


class _AttendsOtherwise(ValueError):
    """A layer does not attend to all tokens before a token."""


class AttentionCall(NamedTuple):
    """How a layer, named `module`, calls attention. `sinks` is the name of a parameter."""

    module: str
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig(ModelConfig):
    """The config of a model that transformers computes.

    `folder` has the config.json. `calls` are the `AttentionCall`s by layer. `written_by` is the
    class and the version of the code, on which graphs depend.
    """

    folder: str
    trusted: bool
    calls: list[Any]
    written_by: str


def transformers_config(folder: Path, ends: list[int], *, trusted: bool) -> FallbackConfig:
    """Return the configuration by transformers of a folder.

    Members that its code does not use have values that any model may have. Raises `ValueError` with
    the reason if the model cannot be served.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = build(folder, trusted=trusted)
    finally:
        torch.set_default_dtype(before)
    config = model.config.get_text_config()
    calls = _note_calls(model)
    attending = config.num_hidden_layers
    if not calls or len(calls) != attending:
        raise ValueError(
            f"{len(calls)} of {attending} layers of {type(model).__name__} attend by transformers' "
            "attention interface; the others keep a state or attend in their own way, which is not "
            "supported; choose another model"
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} keeps a state beside its attention, which is not supported; "
            "choose another model"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ValueError("it has no max_position_embeddings; add the longest context in tokens")
    _check_windows(config, calls, longest)
    first = calls[0]
    # Only an estimate of memory depends on this size. Layers may differ.
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return FallbackConfig(
        architecture="TransformersForCausalLM",
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_layers=len(calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_size,
        rotary_dim=2,
        intermediate_size=int(max(size) if isinstance(size, list | tuple) else size),
        norm_eps=1e-6,
        max_position_embeddings=longest,
        rope_theta=1.0,
        tie_word_embeddings=bool(_tied(model)),
        windows=[call.window for call in calls],
        eos_token_ids=ends,
        dtype=str(config.dtype or "bfloat16").removeprefix("torch."),
        folder=str(folder),
        trusted=trusted,
        calls=[tuple(call) for call in calls],
        written_by=f"{type(model).__name__} {transformers.__version__}",
    )


def _check_windows(config: Any, calls: Sequence[AttentionCall], longest: int) -> None:
    """Raise `ValueError` if a layer needs a mask to see less than its call states."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    # A class without the member ignores it in config.json.
    window = (
        getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else 0
    )
    slides = "sliding_attention" in kinds and 0 < (window or 0) < longest
    is_told = any(call.window is not None for call in calls)
    if "chunked_attention" in kinds or (slides and not is_told):
        raise ValueError(
            "its layers see a part of what is before a token by their mask alone, which is not "
            "supported; choose another model"
        )


def _note_calls(model: Any) -> list[AttentionCall]:
    """Return how each layer calls attention, in order. Raises `ValueError`."""
    base = model.base_model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(
            f"{type(base).__name__} takes no positions, so it attends in its own way or keeps a "
            "state, which is not supported; choose another model"
        )
    for name, module in model.named_modules():
        setattr(module, _NAME, name)
    noted: list[tuple[AttentionCall, int]] = []
    with _noting(noted, model), torch.no_grad(), torch.device("meta"):
        ids = torch.zeros(1, 2, dtype=torch.int64)
        try:
            base(input_ids=ids, position_ids=ids, use_cache=False)
        except _AttendsOtherwise:
            raise
        except Exception:
            logger.debug("%s cannot be followed", type(base).__name__, exc_info=True)
            raise ValueError(
                f"{type(base).__name__} needs more than attention, such as masks, a state or "
                "numbers of its inputs, which is not supported; choose another model"
            ) from None
    parameters = {id(each): name for name, each in model.named_parameters()}
    calls = [call._replace(sinks=parameters.get(sinks)) for call, sinks in noted]
    if len({call.module for call in calls}) < len(calls):
        raise ValueError("a layer attends several times a step; choose another model")
    return calls


@contextmanager
def _noting(noted: list[tuple[AttentionCall, int]], model: Any) -> Iterator[None]:
    """Record calls of attention, with the identity of their sinks, instead of computing them."""

    def note(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: Any,
        **how: Any,
    ) -> tuple[torch.Tensor, None]:
        biased = attention_mask is not None or how.get("position_bias") is not None
        if biased or not getattr(module, "is_causal", True):
            raise _AttendsOtherwise(
                f"{getattr(module, _NAME)} attends otherwise than to all before a token; choose "
                "another model"
            )
        scale = how.get("scaling")
        call = AttentionCall(
            module=getattr(module, _NAME),
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            key_size=k.shape[3],
            value_size=v.shape[3],
            scale=float(k.shape[3] ** -0.5 if scale is None else scale),
            window=how.get("sliding_window"),
            softcap=how.get("softcap"),
        )
        noted.append((call, id(how.get("s_aux"))))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    ALL_ATTENTION_FUNCTIONS.register(_NOTES, note)
    config = model.config.get_text_config()
    config._attn_implementation = _NOTES
    try:
        yield
    finally:
        config._attn_implementation = ATTENTION


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, E] of q [1, H, T, D], k [1, K, T, D], v [1, K, T, E]. An attention function
    of transformers.
    """
    layer: int = getattr(module, _LAYER)
    result = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), layer)
    return result.view(1, -1, q.shape[1], v.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class _Given(nn.Module):
    """Replaces the decoder if only the head is computed, on given hidden states."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden([inputs_embeds])

    @property
    def decoder(self) -> _Given:
        """The name that OPT uses for the inner decoder."""
        return self


class _Hidden(tuple[torch.Tensor]):
    """The result of a decoder. Heads read different attributes of it."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class TransformersForCausalLM(CausalLM):
    """The modules are those of transformers under their names. Linear layers are replaced."""

    config_class: ClassVar[type[ModelConfig]] = FallbackConfig
    read_config = staticmethod(transformers_config)

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        assert isinstance(config, FallbackConfig)
        self.config = config
        self.kv_layers = list(range(config.num_layers))
        self.kv_scales = [(1.0, 1.0)] * config.num_layers
        self.calls = [AttentionCall(*call) for call in config.calls]
        model = build(Path(config.folder), trusted=config.trusted)
        self.tied_weights = _tied(model) if config.tie_word_embeddings else {}
        own_layers(model)
        model.requires_grad_(requires_grad=False)
        for layer, call in enumerate(self.calls):
            setattr(model.get_submodule(call.module), _LAYER, layer)
        for name, child in model.named_children():
            self.add_module(name, child)
        # Not a submodule, because names would appear twice.
        self._head = [model]
        self._base = [model.base_model]
        setattr(model, model.base_model_prefix, _Given())

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        (base,) = self._base
        hidden: torch.Tensor = base(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        )[0]
        return hidden[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        (head,) = self._head
        logits: torch.Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        return [
            KVLayout(
                num_heads=call.num_heads,
                num_kv_heads=call.num_kv_heads,
                key_size=call.key_size,
                value_size=call.value_size,
                scale=call.scale,
                dtype=dtype,
                window=call.window,
                softcap=call.softcap,
                sinks=None if call.sinks is None else self.get_parameter(call.sinks).float(),
            )
            for call in self.calls
        ]

    def remarks(self) -> dict[str, str]:
        name, _, version = self.config.written_by.partition(" ")
        return {"model code": f"{name} of transformers {version} (--model-impl)"}

    @classmethod
    def adapter_tensors(
        cls, config: Any, tensors: Sequence[StoredTensor]
    ) -> Sequence[StoredTensor]:
        """Linear layers are as in checkpoints."""
        return tensors

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """Return the tensors as they are if names and shapes fit, to be read one by one.

        Otherwise transformers reads and converts them, and all of them are in memory at once.
        """
        if (found := _read_by_name(config, tensors)) is not None:
            return found
        disable_progress_bar()
        # The widest dtype of the files, independent of config.json, so that nothing is rounded.
        dtype = reduce(torch.promote_types, (each.dtype for each in tensors), torch.uint8)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.folder,
                trust_remote_code=config.trusted,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=ATTENTION,
            )
        except Exception:
            logger.debug("transformers cannot load %s", config.folder, exc_info=True)
            raise ValueError(
                f"{config.folder}: transformers cannot load the weights; download the model again"
            ) from None
        return [
            StoredTensor(
                Path(config.folder), name, tuple(held.shape), partial(_copy, held), held.dtype
            )
            for name, held in model.state_dict().items()
            if held.is_floating_point()
        ]


def _read_by_name(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor] | None:
    """Return the tensors, or None if their names are not those of the model."""
    with torch.device("meta"):
        model = build(Path(config.folder), trusted=config.trusted)
    state = model.state_dict().items()
    wanted = {name: tuple(each.shape) for name, each in state if each.is_floating_point()}
    prefix, heads = f"{model.base_model_prefix}.", _tied(model)
    found = {}
    for tensor in tensors:
        name = tensor.name if tensor.name in wanted else f"{prefix}{tensor.name}"
        if wanted.get(name) != tensor.shape or name in found:
            return None
        found[name] = tensor._replace(name=name)
    if wanted.keys() - heads.keys() != found.keys() - heads.keys():
        return None
    return list(found.values())


def _copy(held: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(held)


def _tied(model: Any) -> dict[str, str]:
    """Return the name of the head's weight and that of the embedding, if they are tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[head]}.weight": f"{names[embedding]}.weight"}
