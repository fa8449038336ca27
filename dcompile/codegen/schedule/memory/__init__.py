"""Where each buffer is stored, and for how long."""
