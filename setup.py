"""Puts the CPU libraries into a wheel where CMake and a compiler are at hand; without them the wheel is pure Python.

Everything else about the package is in pyproject.toml. An editable installation builds nothing: there,
``python -m rmsnorm_deploy.native build`` does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from rmsnorm_deploy import __version__, native, native_build  # noqa: E402
from rmsnorm_deploy.errors import BackendUnavailable  # noqa: E402


def can_compile() -> bool:
    """Whether the wheel will have libraries; says why not."""
    if native.plugins_folder() is None:
        return False
    try:
        native_build.check_tools("cpu")
    except BackendUnavailable as error:
        print(f"rmsnorm_deploy: a wheel without native libraries, since {error}", file=sys.stderr)
        return False
    return True


class BuildWithLibraries(build_py):
    """The Python files, and rmsnorm_deploy/lib."""

    def run(self) -> None:
        super().run()
        sources = native.plugins_folder()
        if self.editable_mode or sources is None or not self.distribution.has_ext_modules():
            return
        target = Path(self.build_lib).resolve() / "rmsnorm_deploy" / "lib"
        native_build.compile_into(
            target, "cpu", sources, native.GROUPS["cpu"].options, native.wheel_identity(__version__)
        )


class PlatformDistribution(Distribution):
    """Marks the wheel as one of this platform where it has libraries; they do not depend on the Python version."""

    def has_ext_modules(self) -> bool:
        if not hasattr(self, "_libraries"):
            self._libraries = can_compile()
        return self._libraries


commands: dict[str, Any] = {"build_py": BuildWithLibraries}
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1: the wheel is then tagged for one Python version
    pass
else:

    class AnyPython(bdist_wheel):
        """py3-none-PLATFORM: the libraries are plain C, loaded with ctypes or by ONNX Runtime."""

        def get_tag(self) -> tuple[str, str, str]:
            _, _, platform = super().get_tag()
            return "py3", "none", platform

    commands["bdist_wheel"] = AnyPython

setup(cmdclass=commands, distclass=PlatformDistribution)
