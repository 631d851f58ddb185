"""Proposals of tokens that a step verifies together with the next token of a request."""
