"""Other compilers for the compute between collectives: which there are, and how each is given a region."""
