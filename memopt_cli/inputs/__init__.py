"""The inputs of a step: how they are written, and which of their dimensions is the batch."""
