"""Vision towers in GGUF files (mmproj): a file per kind of projector, as llama.cpp names it."""
