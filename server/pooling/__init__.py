"""The same server over a model that makes vectors or scores: embeddings, reranking, scoring."""
