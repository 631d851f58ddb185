"""HTTP with bounds: connections, headers, bodies."""
