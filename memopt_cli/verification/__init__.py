"""Comparison of the optimized model with the original: in the recorded step, and in a few further ones."""
