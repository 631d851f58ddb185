"""One engine in several processes."""
