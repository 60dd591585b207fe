"""Profiling subprocesses: they run the user's model, and may die without harm."""
