"""Models that give a vector or a score for each text: embedders and rerankers."""
