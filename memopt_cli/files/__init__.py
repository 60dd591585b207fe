"""The files that memopt writes: what they contain, how they are read back, and how they reach the disk."""
