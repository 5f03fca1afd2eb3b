"""Annotations: the shardings that the user requests of values, in every form."""
