"""Annotations: what the user says about the sharding of a value, as an equation of the global program."""

from jax.extend.core import Primitive

annotate_p = Primitive("annotate")
"""annotate x: the value x, with `dims`, per dim the axes that split it, or None where it is open (UNCONSTRAINED), and
`source`, the words in which messages name the annotation, such as "in_shardings[0]['params']"."""
