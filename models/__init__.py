"""Plain models, one file each; their shardings in short files beside them; and the main job, `python -m
models.train`.
"""
