"""Code generation: lower ATen to loops, schedule them, and emit C++, Triton and the host program."""
