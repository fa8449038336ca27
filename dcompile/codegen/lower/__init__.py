"""From ATen to loops: one rule per op, views as index maps, library calls where no loop is wanted.

`program.py` is the way in. Nothing is imported here, for AOTAutograd needs the table of decompositions even where all
that it traces is in the cache already.
"""
