"""A training step as people take it (loss, precision, optimizer, a step of their own), and plans on its model."""
