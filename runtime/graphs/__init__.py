"""The graphs that run steps, and how they are compiled and captured."""
