"""What every room of the runtime shares: requests, messages, batches and the forward context."""
