"""Account for the memory of a step: profile and inspect a model, measure a rank of a real group."""
