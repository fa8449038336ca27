"""The order of steps: collectives overlapped with kernels by a cost model."""
