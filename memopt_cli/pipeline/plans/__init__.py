"""Finding a plan, proving it, writing it, and applying one that was written."""
