"""Jina Embeddings v3 (arXiv:2409.10173): XLM-RoBERTa with rotary positions and an adapter for each
task. Jina Reranker v2: the same layers with learned positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..config.encoder import EncoderConfig, check_whole
from ..layers.linear import Embedding, Linear
from ..layers.task_adapter import Adapter, Task
from .bert import Bert
from .nomic_bert import NomicBert, plain_rope, positive, rotary_fields
from .roberta import Roberta

ENCODER = "JinaEmbeddingsV3"
MODEL_TYPE = "jina_embeddings_v3"
ALSO_MODEL_TYPE = "xlm-roberta"
CONFIG_OF_OTHERS = "XLMRobertaFlashConfig"
_MOST_TASKS, _MOST_RANK = 100, 1024


class JinaEmbeddingsV3(NomicBert):
    """The classifier is that of RoBERTa. `task` selects the adapters of the next forward."""

    base: ClassVar = "roberta."
    other_base: ClassVar = "model."
    unused: ClassVar = Roberta.unused
    config_names: ClassVar = {"rope_theta": "rotary_emb_base"}
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 250002,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "rotary",
        "rope_theta": 20000.0,
        "rope_parameters": None,
        "attention_bias": True,
        "mlp_bias": True,
        "lora_adaptations": None,
        "lora_rank": 4,
        "lora_alpha": 1,
    }
    tensor_names: ClassVar = {
        **NomicBert.tensor_names,
        "mixer.Wqkv": "qkv",
        "mixer.out_proj": "out",
        "parametrizations.weight.original": "weight",
        "parametrizations.weight.0": "adapter",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = rotary_fields(config, *plain_rope(config), gated=False)
        tasks, rank = config.lora_adaptations or [], config.lora_rank
        if tasks:
            check_whole(config, "lora_rank", least=1)
            if not isinstance(tasks, list) or len(tasks) > _MOST_TASKS or rank > _MOST_RANK:
                raise ValueError(
                    f"lora_adaptations must be a list of at most {_MOST_TASKS} names, and "
                    f"lora_rank at most {_MOST_RANK}; download the model again"
                )
        own: dict[str, Any] = {
            "types": 1,
            "tasks": len(tasks),
            "rank": rank,
            "scale": positive("lora_alpha", config.lora_alpha) / max(1, rank) if tasks else 0.0,
        }
        match config.position_embedding_type:
            case "rotary":
                longest = config.max_position_embeddings
            case "absolute":
                check_whole(config, "pad_token_id", least=0)
                own |= {"rope": None, "positions": config.max_position_embeddings}
                own["first_position"] = config.pad_token_id + 1
                longest = config.max_position_embeddings - own["first_position"]
            case kind:
                raise ValueError(
                    f"position_embedding_type {kind!r:.60} is not supported; choose another model"
                )
        return {**fields, "max_length": longest, "extra": {**fields["extra"], **own}}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.task, extra = Task(), config.extra
        if not extra["tasks"]:
            return
        for part in (self.embeddings, self.encoder):
            for layer in list(part.modules()):
                if isinstance(layer, Linear | Embedding):
                    sizes = {name: extra[name] for name in ("tasks", "rank", "scale")}
                    Adapter(layer, self.task, **sizes)

    def make_classifier(self, config: EncoderConfig) -> None:
        Roberta.make_classifier(self, config)  # type: ignore[arg-type]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return Roberta.classify(self, pooled)  # type: ignore[arg-type]
