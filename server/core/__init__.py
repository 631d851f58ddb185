"""What every room of the server shares: errors, limits, and the declared parameters."""
