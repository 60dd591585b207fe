"""The search for a plan, only on records and without torch; ``planner.py`` is its front.

``block_tree.py`` turns a recorded step into blocks, ``solver.py`` solves for the best schedule of these,
``cost_model.py`` prices plans, and ``dry_runs.py`` and ``chunk_trials.py`` ask for the runs that decide.
"""
