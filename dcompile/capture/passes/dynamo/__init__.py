"""Passes over the graph that TorchDynamo captured, before AOTAutograd traces it."""
