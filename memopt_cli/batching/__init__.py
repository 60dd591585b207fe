"""A library beside the commands: batches that follow memory while a model trains, and batches of sequences."""
