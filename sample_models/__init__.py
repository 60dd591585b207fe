"""Real, small models that memopt is shown and tested on.

Each module defines one model, a ``build()`` that makes it (the same weights every time) and ``INPUTS``, its input spec.
``python -m sample_models [NAME ...]`` writes them to ``sample_models/build/``, with that spec in ``NAME.inputs.yaml``:
pickled (``NAME.pt``), scripted (``NAME.ts``), traced (``NAME.traced.ts``) and exported (``NAME.pt2``).
"""
