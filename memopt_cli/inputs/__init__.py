"""The inputs of a step: the notation that describes them, and which dimension is the batch."""
