"""The version of memopt; nothing else defines it."""

__version__ = "0.1.0"
