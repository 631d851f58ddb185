"""A forward becomes captured graphs: traced once, cut, each distinct piece compiled once, recorded
per number of tokens.
"""
