"""A program for one device and a few sharding annotations in, one readable per-device program with explicit collectives out."""

from shardax.annotate import annotate as annotate
from shardax.annotate import replicate as replicate
from shardax.api import shard_jit as shard_jit
from shardax.options import Options as Options
from shardax.spmd_rules.registry import LINEAR as LINEAR
from shardax.spmd_rules.registry import MOVES as MOVES
from shardax.spmd_rules.registry import register_rule as register_rule
