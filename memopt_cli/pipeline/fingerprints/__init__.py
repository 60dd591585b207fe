"""Two steps, or two trainings, held against each other by what was noted of each: no tensor of either is here."""
