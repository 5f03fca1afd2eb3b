from shardax.pipeline.schedules import make_schedule as make_schedule
from shardax.pipeline.simulate import Costs as Costs
from shardax.pipeline.table import Instruction as Instruction
from shardax.pipeline.table import Schedule as Schedule
