"""What ``memopt recommend-batch`` is made of: how large a step fits, and how sequences are batched."""
