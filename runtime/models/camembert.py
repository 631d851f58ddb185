"""CamemBERT (arXiv:1911.03894): RoBERTa for French, under another name."""

from __future__ import annotations

from .roberta import Roberta

ENCODER = "Camembert"
MODEL_TYPE = "camembert"


class Camembert(Roberta):
    """Checkpoints name their tensors "roberta" too."""
