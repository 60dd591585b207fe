"""Searches and estimates that work on records alone: plans, batch sizes, and the needs of a step on another card."""
