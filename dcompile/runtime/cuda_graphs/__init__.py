"""Record a program as a CUDA graph, replay it, share memory between recordings."""
