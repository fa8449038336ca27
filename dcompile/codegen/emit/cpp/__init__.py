"""The C++ target: kernels of plain loops, their plan and their text, and what compiles them."""
