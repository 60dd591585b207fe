"""Reading pickled models without Python's unpickler: the opcodes are followed, the objects audited, then built.

1. :mod:`.scan` follows the opcodes on stand-ins (:mod:`.nodes`): nothing is imported, built or called.
2. :mod:`.audit` checks every object that the model reaches.  Each must be of one of the :mod:`.kinds`, which list what
   a file may hold and how it is made; otherwise the file is refused.
3. :mod:`.build` makes the objects, in the order of the opcodes.  No other code makes any.
"""
