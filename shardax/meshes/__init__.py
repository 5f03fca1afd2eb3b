"""Several meshes over the same devices as one."""
