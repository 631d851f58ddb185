"""A load of mixed requests that checks every answer."""
