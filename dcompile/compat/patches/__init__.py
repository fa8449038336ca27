"""Every patch of torch, one module for each thing that is changed."""
