"""The functions that answer jobs, in a file for each kind of step, and one for jobs that run no step."""
