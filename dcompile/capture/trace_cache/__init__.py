"""Traces of AOTAutograd on disk: forward and backward of a Dynamo graph, by all that tracing it looks at."""
