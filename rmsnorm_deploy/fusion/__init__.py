"""Finds RMSNorms in ONNX graphs by what they compute, proves each one, and makes it one op.

Read in this order: meaning.py (products of powers), interpret.py (a meaning for every value), recognise.py (which are
norms), region.py and prove.py (run both sides), rewrite.py (put the op in), fuse.py (the whole).
"""

from rmsnorm_deploy.fusion.fuse import FusionResult, fuse
from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord

__all__ = ["FusionResult", "LeftRecord", "NormRecord", "fuse"]
