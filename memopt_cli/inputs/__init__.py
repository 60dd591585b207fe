"""The inputs of a step: the notation for them, and their batch dimension."""
