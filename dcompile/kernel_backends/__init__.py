"""Other compilers for the regions between collectives: a table of them, and a way to call each."""
