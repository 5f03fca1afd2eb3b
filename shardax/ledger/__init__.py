"""What a local program sends: its collectives, why each is there, and how lines and sizes are shown."""
