"""OpenAI's files and batches: many requests in a file, answered when there is room for them."""
