"""Verification: whether a model computes the same with a plan as without, in the recorded step and in further ones.

Also here: trials of modules in chunks (``chunking.py``), and what ``memopt verify`` records to compare two models.
"""
