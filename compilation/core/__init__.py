"""Shared by all parts of the compiler: its errors, and the ops at which a forward is split."""
