"""Adapters (LoRA): read from files, placed into slots of the device, and added by layers."""
