"""What a profiling subprocess does with the model: each job's function, by what it takes to answer it."""
