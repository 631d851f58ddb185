"""HTTP and messages; never a tensor."""
