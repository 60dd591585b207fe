"""What memopt found out, for people and for programs."""
