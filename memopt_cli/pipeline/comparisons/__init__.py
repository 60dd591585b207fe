"""Comparing two models, two measurements, or several ways to learn."""
