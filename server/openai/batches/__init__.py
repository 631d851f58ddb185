"""OpenAI's files and batches: the requests of a file are answered when the server has room."""
