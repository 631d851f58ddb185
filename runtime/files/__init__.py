"""Model folders and files: where they are and what their headers say. Reads no tensor."""
