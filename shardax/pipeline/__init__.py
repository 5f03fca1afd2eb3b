"""Pipelining: layers spread over the stages of a mesh axis, one program for all of them, any schedule."""

from shardax.pipeline.cut import stage
from shardax.pipeline.loss import apply, value_and_grad
from shardax.pipeline.packed import Packed, Packing, pack, packing, unpack
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.table import Instruction, Schedule

__all__ = [
    "Instruction",
    "Packed",
    "Packing",
    "Schedule",
    "apply",
    "make_schedule",
    "pack",
    "packing",
    "stage",
    "unpack",
    "value_and_grad",
]
