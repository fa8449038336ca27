"""When each step runs: collectives overlapped with kernels by a cost model."""
