"""Buckets, shards and collectives in flight."""
