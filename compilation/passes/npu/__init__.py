"""Passes that only Ascend NPUs have."""
