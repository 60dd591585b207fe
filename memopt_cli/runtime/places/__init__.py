"""Places where stored tensors wait for backward: the device where they are, host memory, or a file on the disk.

A stored tensor has a compressor, which determines how it is held, and a place, which determines where.
``interface.py`` defines what a place does; ``host.py`` and ``disk.py`` are the places.  ``schedule.py`` sends tensors
away in forward and fetches them in backward, in the order of the step and not by the clock: the peak is the same bytes
in every run, and a dry run can follow it.  ``runtime/segment_call.py`` applies that to what a segment stores,
``runtime/packing.py`` to what is saved outside.

With a window of one segment::

    forward     1 begins to send x1     2 begins to send x2     2 ends: waits for x1, gives it up     3 …
    backward    3 begins to fetch x2    runs again              2 begins to fetch x1                  …
"""
