"""Tiers below the KV cache: blocks that left its memory, kept in host memory or on disk."""
