"""Elements of a graph's tensors as functions of their indices: how attention masks are recognised."""
