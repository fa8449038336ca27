"""Every pass of every stage, in order: the table of contents of the compiler."""
