"""Copy-engine all-gathers from other GPUs' memory (CUDA IPC)."""
