"""Explain an error of memory that ran out, and find what fits."""
