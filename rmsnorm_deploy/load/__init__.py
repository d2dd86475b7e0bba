"""The load stage: whatever the user has, as a ``Source`` that the tracer can take. Usable alone.

source = load_source("model.pt", imports=["modeling.py"], inputs=["x=float32[batch,seq,64]"])
module, notes = prepare_module(model, args, kwargs)
"""

from rmsnorm_deploy.load.infer import refused_call
from rmsnorm_deploy.load.loader import load_source
from rmsnorm_deploy.load.prepare import prepare_module, to_cpu
from rmsnorm_deploy.load.source import Source

__all__ = ["Source", "load_source", "prepare_module", "refused_call", "to_cpu"]
