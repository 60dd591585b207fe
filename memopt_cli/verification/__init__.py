"""Verifying that a model computes the same with a plan or in chunks as without, and comparing two models."""
