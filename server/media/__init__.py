"""Images of requests: from the parts that clients send to what the model reads."""
