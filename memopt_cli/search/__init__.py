"""What is worked out from records alone: plans, batch sizes, and what a step takes on another card."""
