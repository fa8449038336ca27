"""Coordination of ranks over the store: agreement, heartbeat, watchdog, shared programs."""
