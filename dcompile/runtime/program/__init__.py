"""Load and launch kernels and host programs."""
