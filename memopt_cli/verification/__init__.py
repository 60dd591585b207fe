"""Verification: does a model compute the same with a plan, or in chunks, as without?  And the records of two models."""
