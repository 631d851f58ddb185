"""A request becomes sequences, and outputs become a stream: for every endpoint family."""
