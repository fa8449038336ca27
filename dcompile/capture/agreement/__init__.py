"""What ranks compare before they compile: captured graphs, uses of parameters, plans of collectives."""
