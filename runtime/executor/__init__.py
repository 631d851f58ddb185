"""A step on one device: batch tensors, the model's forward, memory."""
