"""What JAX shows only expanded, found in the graph and written as one node."""
