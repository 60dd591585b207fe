"""Comparisons of two steps, or two trainings, by a few numbers recorded of each tensor."""
