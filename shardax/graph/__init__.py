"""The flat view of a program on which completion and partition work, and what can be read off it."""
