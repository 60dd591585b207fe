"""Reports of the results of every command, for people and for programs."""
