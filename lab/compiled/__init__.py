"""Triton kernels as they are launched, compiled for GPUs that need not be there."""
