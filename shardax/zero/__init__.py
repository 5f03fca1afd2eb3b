"""ZeRO: optimizer state, gradients and parameters sharded over the devices that compute on different data."""

from shardax.zero.at_host import AtHost
from shardax.zero.bucket import Bucketed
from shardax.zero.dealt import dealt
from shardax.zero.files import open_safetensors
from shardax.zero.init import init, pad
from shardax.zero.padded import Padded, unpad
from shardax.zero.stream import stream
from shardax.zero.transform import Zero
from shardax.zero.wrapped import shard, specs

__all__ = [
    "AtHost",
    "Bucketed",
    "Padded",
    "Zero",
    "dealt",
    "init",
    "open_safetensors",
    "pad",
    "shard",
    "specs",
    "stream",
    "unpad",
]
