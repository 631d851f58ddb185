"""The web page, the documentation page and the status endpoint."""
