"""Text of speech: Whisper (arXiv:2212.04356), in an engine of its own."""
