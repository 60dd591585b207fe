"""Handing the pipeline a model, or a step, that is in memory."""
