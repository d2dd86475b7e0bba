"""TensorRT engines of a bundle, with and without the plugin: ``python -m rmsnorm_deploy.engine BUNDLE``."""

from __future__ import annotations

from rmsnorm_deploy.engine.build import EngineOptions, build_engines

__all__ = ["EngineOptions", "build_engines"]
