"""Text that people type or read: sizes and times, optimizers, YAML and JSON, and options with their spellings."""
