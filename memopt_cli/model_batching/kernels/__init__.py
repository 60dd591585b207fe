"""Kernels: layers and functions that compute many models in one call."""
