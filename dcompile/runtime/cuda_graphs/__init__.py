"""Record programs as CUDA graphs, replay them, and share memory between recordings."""
