"""Finding the batch that fits, or that trains fastest."""
