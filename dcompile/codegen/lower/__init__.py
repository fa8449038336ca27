"""Lower ATen to loops: one rule for each op, views as index maps, library calls where no loop is wanted.

`lower.py` is the entry point. This file imports nothing: AOTAutograd needs the table of decompositions even if all
graphs come from the cache.
"""
