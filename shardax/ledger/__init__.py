"""What a local program sends: its collectives, why each is sent, and how lines and sizes are shown."""
