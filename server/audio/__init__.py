"""OpenAI's endpoints for text of speech."""
