"""The inputs of a step: their notation, and the dimension that is the batch."""
