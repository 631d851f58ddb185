"""Text becomes token ids, and token ids become text."""
