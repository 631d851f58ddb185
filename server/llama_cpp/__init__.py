"""The endpoints of llama.cpp's server."""
