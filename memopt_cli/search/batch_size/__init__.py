"""The searches of ``memopt recommend-batch``: for a batch, for a batch with a plan, and for copies of a model."""
