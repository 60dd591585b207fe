"""Searches and estimates that work only on records: plans, batch sizes, and the needs of a step on another card."""
