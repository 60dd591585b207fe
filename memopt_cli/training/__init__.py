"""A training step as people take it (loss, precision, optimizer, their own step), and plans on its model."""
