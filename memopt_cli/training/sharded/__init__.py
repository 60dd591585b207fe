"""A model spread over many ranks: those of a real process group, or one rank of a fake group in this process."""
