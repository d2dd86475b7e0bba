"""Parity: every backend of a bundle against float64 truth, in ULPs. docs/parity.md says how the verdicts come about."""

from rmsnorm_deploy.parity.result import Measurement, ParityReport
from rmsnorm_deploy.parity.run import run_parity
from rmsnorm_deploy.parity.samples import Sample, load_samples, make_samples

__all__ = ["Measurement", "ParityReport", "Sample", "load_samples", "make_samples", "run_parity"]
