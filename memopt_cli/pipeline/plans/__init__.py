"""Find a plan, prove it, write it, and apply one that was written."""
