"""What a later start takes over from an earlier one: AOTAutograd's traces, under keys of all that tracing reads."""
