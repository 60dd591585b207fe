"""The files that memopt writes: their contents, reading them back, and writing them to disk."""
