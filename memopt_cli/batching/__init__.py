"""How large a step fits."""
