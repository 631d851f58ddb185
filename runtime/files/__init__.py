"""Finds model folders and files and reads their headers, but no tensors."""
