"""Weights from safetensors folders and GGUF files."""
