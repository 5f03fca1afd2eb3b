"""The nominal prices, in bytes sent, by which alternatives are compared. All chips have the same, and so the same programs.

A chip of the v4 to v6e generations does about 4,000 bf16 FLOPs and moves about 20 bytes of HBM in the time in which a link
carries one byte (275 TF, 1200 GB/s and 50 GB/s on v4). Starting a collective costs about a microsecond, tens of kilobytes on
such a link; it is priced at far less, so that bytes decide and the number of collectives only between near equals.
"""

COLLECTIVE = 128.0  # bytes sent: starting one collective
MEMORY_BYTE = 1 / 20  # bytes sent: reading or writing one byte of memory
FLOP = 1 / 4000  # bytes sent: one floating-point operation
