"""Whether results are right: references for a graph or a program, and the tolerance of a comparison."""
