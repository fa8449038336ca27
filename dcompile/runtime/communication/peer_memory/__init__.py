"""All-gathers by copy engines from other GPUs' memory (CUDA IPC)."""
