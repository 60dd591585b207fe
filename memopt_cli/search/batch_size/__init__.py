"""The searches behind ``memopt recommend-batch``: for a batch, for a batch with a plan, and for copies of a model.

``search.py`` is the first of these; it decides which batches run, and ``outcome.py`` what the answer is.
"""
