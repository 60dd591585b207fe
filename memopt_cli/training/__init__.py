"""A training step: how it is taken, by whom, and how a plan is put on its model."""
