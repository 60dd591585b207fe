"""Routes: three implementations that run many models as one."""
