"""The files that memopt writes: what is in them, and how they reach the disk."""
