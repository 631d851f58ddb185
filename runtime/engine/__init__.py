"""The engine process: its loop, its scheduler, its messages."""
