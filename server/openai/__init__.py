"""OpenAI's endpoints, one file per family."""
