"""Measurements, each a command: `python -m benchmarks.<name>`."""
