"""HTTP/1.1 with limits on connections, headers and bodies."""
