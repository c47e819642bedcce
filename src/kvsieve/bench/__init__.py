"""Speed of a decode step, phase by phase, beside dense attention and the memory's own speed."""

from kvsieve.bench.result import Case, DenseTime, FlowResult, Measurement, Phase
from kvsieve.bench.run import CPU_LAYERS, run_bench
from kvsieve.bench.seeding import SeedingMeasurement, run_seeding
from kvsieve.bench.setting import Setting

__all__ = [
    "CPU_LAYERS",
    "Case",
    "DenseTime",
    "FlowResult",
    "Measurement",
    "Phase",
    "SeedingMeasurement",
    "Setting",
    "run_bench",
    "run_seeding",
]
