"""Small models of each kind, for a machine that memopt has not seen: see ``memopt selftest``."""
