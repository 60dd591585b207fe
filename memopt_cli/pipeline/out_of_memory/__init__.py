"""Explaining an out-of-memory error, and finding what fits."""
