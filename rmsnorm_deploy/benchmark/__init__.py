"""Timings: a bundle's model against its LayerNorm twin, and this package's kernels against their peers."""

from rmsnorm_deploy.benchmark.model import run_benchmark
from rmsnorm_deploy.benchmark.result import BenchmarkReport

__all__ = ["BenchmarkReport", "run_benchmark"]
