"""Annotations: what the user says about the sharding of a value, in every form in which it may be said."""
