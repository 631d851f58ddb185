"""The same server over a diffusion pipeline: images instead of text."""
