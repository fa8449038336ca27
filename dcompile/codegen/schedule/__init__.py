"""Schedule a program: fuse its loops, order its steps, and plan its memory."""
