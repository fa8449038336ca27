"""Agreement between ranks: the captured graphs, uses of parameters and plans of collectives that they compare."""
