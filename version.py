"""The version of Piecework."""

__version__ = "0.1.0"
