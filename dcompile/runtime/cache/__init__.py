"""Cache of compiled programs on disk: keys, entries and eviction."""
