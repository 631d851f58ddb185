"""The paged KV cache: tensors, pages and shared prefixes."""
