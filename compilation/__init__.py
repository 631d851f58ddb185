"""Turns a forward into captured graphs.

The forward is traced once and split into pieces. Each distinct piece is compiled once, and recorded
for each captured number of tokens.
"""
