"""Models and functions compiled ahead of time into files that run without the compiler."""
