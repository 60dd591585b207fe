"""Routes: the ways to run many models as one."""
