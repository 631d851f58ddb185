"""The server of a pooling model: embeddings, reranking, scoring, classification."""
