"""ZeRO: optimizer state, gradients and parameters sharded over the devices that compute on different data."""

from shardax.zero.transform import Zero

__all__ = ["Zero"]
