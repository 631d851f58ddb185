"""Changes to the graph of a piece before it is compiled."""
