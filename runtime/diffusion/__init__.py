"""Diffusion models: stages over one state, with the models themselves from diffusers."""
