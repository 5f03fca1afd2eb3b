"""A program for one device and a few sharding annotations in, one readable per-device program with explicit collectives out."""

from shardax.abstract_state import abstract_state as abstract_state
from shardax.annotate import annotate as annotate
from shardax.annotate import replicate as replicate
from shardax.api import shard_jit as shard_jit
from shardax.names import Partial as Partial
from shardax.names import Replicate as Replicate
from shardax.names import Shard as Shard
from shardax.names import mark_sharding as mark_sharding
from shardax.names import mesh_split as mesh_split
from shardax.names import redistribute as redistribute
from shardax.names import shard as shard
from shardax.names import split as split
from shardax.options import Options as Options
from shardax.options import Refused as Refused
from shardax.partition_as import partition_as as partition_as
from shardax.spmd_rules.registry import LINEAR as LINEAR
from shardax.spmd_rules.registry import MOVES as MOVES
from shardax.spmd_rules.registry import register_rule as register_rule
