"""What is in a model: every RMSNorm with what it is made of, and every look-alike with the reason it was left.

inspection = inspect_model("model.onnx")
for norm in inspection.norms: ...
"""

from rmsnorm_deploy.inspect.explain import Inspection, inspect_model, inspect_source

__all__ = ["Inspection", "inspect_model", "inspect_source"]
