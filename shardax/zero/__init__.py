"""ZeRO: optimizer state, gradients and parameters sharded over the devices that compute on different data."""

from shardax.zero.transform import Zero
from shardax.zero.wrapped import shard, specs

__all__ = ["Zero", "shard", "specs"]
