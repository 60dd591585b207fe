"""The search behind ``memopt recommend-batch``: how large a step fits, and how sequences are batched."""
