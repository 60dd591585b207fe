"""The search for a plan, on records alone and without torch; ``planner.py`` is its front.

``block_tree.py`` turns a recorded step into blocks, ``search.py`` solves for the best schedule of these,
``cost_model.py`` prices plans, and ``questions.py`` asks for the dry runs that decide.
"""
