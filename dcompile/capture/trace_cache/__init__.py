"""Cache of AOTAutograd's traces: forward and backward of a Dynamo graph, keyed by everything that tracing reads."""
