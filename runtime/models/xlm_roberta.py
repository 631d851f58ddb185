"""XLM-RoBERTa (arXiv:1911.02116): RoBERTa for a hundred languages, under another name."""

from __future__ import annotations

from .roberta import Roberta

ENCODER = "XLMRoberta"
MODEL_TYPE = "xlm-roberta"


class XLMRoberta(Roberta):
    """Checkpoints name their tensors "roberta" too."""
