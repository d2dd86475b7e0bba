"""``python -m rmsnorm_deploy``: the commands there are."""

from __future__ import annotations

_COMMANDS = {
    "export": "a PyTorch or ONNX model to a bundle, with parity, timing and report",
    "inspect": "every RMSNorm and every look-alike of a model; writes nothing",
    "verify": "that a bundle's model files are as exported, and parity again",
    "parity": "a bundle's backends against float64; finds the norm that differs",
    "benchmark": "speed of a bundle, of the kernels, of the export itself",
    "engine": "TensorRT engines of a bundle, with and without the plugin",
    "native": "builds the compiled kernels",
    "doctor": "what is there on this machine, and what to install",
}

if __name__ == "__main__":
    for name, purpose in _COMMANDS.items():
        print(f"python -m rmsnorm_deploy.{name:<10} {purpose}")
