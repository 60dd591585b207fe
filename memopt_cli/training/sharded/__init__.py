"""A model spread over many ranks: of a real group, or of one in which this process is the only rank that there is."""
