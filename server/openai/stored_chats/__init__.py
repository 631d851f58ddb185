"""Chat completions that a client lets the server store (`store: true`)."""
