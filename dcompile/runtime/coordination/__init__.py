"""What ranks tell each other: agreement, heartbeat, watchdog, shared programs."""
