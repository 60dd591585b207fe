"""The functions that answer jobs about the model's steps, in a file for each kind of step."""
