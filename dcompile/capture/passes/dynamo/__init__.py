"""Rewrites of the graph that TorchDynamo captured, before autograd traces it."""
