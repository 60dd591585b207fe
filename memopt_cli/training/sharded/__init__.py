"""A model spread over many ranks, of a real process group or of a fake group in this process."""
