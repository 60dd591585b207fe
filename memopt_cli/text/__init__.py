"""Text that people type or read: sizes and times, optimizers, YAML and JSON, and the names of options in Python."""
