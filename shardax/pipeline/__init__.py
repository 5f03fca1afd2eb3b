"""Pipelining: layers spread over the stages of a mesh axis, one program for all of them, any schedule."""

from shardax.pipeline.cut import stage
from shardax.pipeline.loss import apply, value_and_grad
from shardax.pipeline.outside import outside
from shardax.pipeline.packed import Packed, Packing, packing
from shardax.pipeline.repacking import pack, unpack
from shardax.pipeline.schedules import make_schedule
from shardax.pipeline.table import Instruction, Schedule
from shardax.pipeline.transform import Pipeline

__all__ = [
    "Instruction",
    "Packed",
    "Packing",
    "Pipeline",
    "Schedule",
    "apply",
    "make_schedule",
    "outside",
    "pack",
    "packing",
    "stage",
    "unpack",
    "value_and_grad",
]
