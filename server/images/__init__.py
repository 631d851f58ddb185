"""The server of a diffusion pipeline, which generates images."""
