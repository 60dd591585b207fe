"""The files that memopt writes: their contents, and how they reach the disk."""
