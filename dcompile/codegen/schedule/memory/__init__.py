"""Memory planning: the storage and the live range of each buffer."""
