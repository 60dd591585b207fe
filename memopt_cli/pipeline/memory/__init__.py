"""Accounting for the memory of a step: profiling and inspecting a model, measuring a rank of a real group."""
