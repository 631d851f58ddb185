"""The configuration of an encoder, read from config.json without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
_MOST = {"num_layers": 10_000, "num_labels": 100_000}
_WHOLE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A transformer whose tokens see each other in both directions.

    Lengths are in tokens. Raises `ValueError` for numbers that no model can have.

        EncoderConfig.from_content(content, Bert)

    Attributes:
        num_labels: Numbers that a classifier gives. 0: there is no classifier.
        dtype: The format of the stored weights.
        extra: Members of a single architecture.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_length: int
    norm_eps: float
    activation: str
    num_labels: int = 0
    dtype: str = "float32"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be more than 0, got {getattr(self, name)}; "
                    "download the model again"
                )
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ValueError(
                    f"{name} must be at most {most}, got {getattr(self, name)}; download the model "
                    "again"
                )
        if self.max_length < 1:
            raise ValueError("max_position_embeddings leaves no position; download the model again")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads cannot share a hidden_size of {self.hidden_size}; "
                "download the model again"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"the activation {self.activation!r:.60} is not supported; supported: "
                f"{', '.join(ACTIVATIONS)}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_content(cls, content: Mapping[str, Any], model: Any) -> EncoderConfig:
        """Return the config for a config.json.

        `model` is a class with the interface of `models.bert.Bert`. Its `config_defaults` are the
        values of transformers for missing members. Its `config_names` are names of members that
        differ in config.json. Its `config_fields` gives the fields that differ between
        architectures.
        """
        own = {name: content[said] for name, said in model.config_names.items() if said in content}
        members = SimpleNamespace(**{**model.config_defaults, **content, **own})
        for name in _WHOLE:
            check_whole(members, name)
        if getattr(members, "is_decoder", False):
            raise ValueError('it says "is_decoder"; such a model is no encoder: choose another')
        is_classifier = str(content["architectures"][0]).endswith("ForSequenceClassification")
        return cls(
            vocab_size=members.vocab_size,
            hidden_size=members.hidden_size,
            num_layers=members.num_hidden_layers,
            num_heads=members.num_attention_heads,
            intermediate_size=members.intermediate_size,
            num_labels=label_count(content) if is_classifier else 0,
            dtype=str(content.get("dtype") or content.get("torch_dtype") or "float32"),
            **{"max_length": members.max_position_embeddings, **model.config_fields(members)},
        )


def check_whole(members: Any, *names: str, least: int | None = None) -> None:
    """Raise `ValueError` if a member is not a whole number of at least `least`."""
    for name in names:
        value = getattr(members, name)
        if type(value) is not int:
            raise ValueError(
                f"{name} must be a whole number, got {value!r:.60}; download the model again"
            )
        if least is not None and value < least:
            raise ValueError(
                f"{name} must be at least {least}, got {value}; download the model again"
            )


def label_count(content: Mapping[str, Any]) -> int:
    """Return how many numbers a classifier gives, by the rules of transformers. Raises
    `ValueError`.
    """
    labels = content.get("id2label")
    count = content.get("num_labels", 2 if labels is None else None)
    if count is None and isinstance(labels, dict):
        count = len(labels)
    if type(count) is not int or count < 1:
        raise ValueError(
            f"num_labels must be at least 1, got {count!r:.60}; download the model again"
        )
    return count
