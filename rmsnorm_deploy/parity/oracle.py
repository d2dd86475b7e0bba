"""The float64 truth of a bundle: its own unfused source, lifted to float64 and run on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.ulp import Array

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.parity.lift_torch import Observer
    from rmsnorm_deploy.runtime.session import Session


class BundleLike(Protocol):
    """The part of `rmsnorm_deploy.Bundle` that parity, the benchmark and the report read."""

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def model_path(self) -> Path: ...

    @property
    def reference_path(self) -> Path | None: ...

    @property
    def eager(self) -> torch.nn.Module | None: ...

    def program(self) -> torch.export.ExportedProgram | None: ...

    def session(self, backend: str = ..., **options: Any) -> Session: ...


class Oracle(ABC):
    """Float64 outputs for a model's inputs.

    ``description`` says what is lifted and what runs it, ``narrowed`` which operators are not in float64.
    """

    description: str
    narrowed: Sequence[str] = ()

    @abstractmethod
    def __call__(self, feeds: Mapping[str, Array], observe: Observer | None = None) -> list[Array]:
        """The outputs in the manifest's order, floats as float64, for arrays by input name in the model's dtypes.

        ``observe`` sees each value of a traced program on the way.
        """

    def in_own_dtypes(self, feeds: Mapping[str, Array]) -> list[Array] | None:
        """The outputs of the traced program as it is, not lifted; None for a source that is no program."""
        return None


class TorchOracle(Oracle):
    """The traced program of a torch source."""

    def __init__(self, program: torch.export.ExportedProgram, signature: Mapping[str, Any]) -> None:
        from rmsnorm_deploy.parity.lift_torch import TorchProgram

        self.program = TorchProgram(program, signature["parameters"])
        self._paths = {item["name"]: item.get("path", item["name"]) for item in signature["inputs"]}

    @property
    def narrowed(self) -> Sequence[str]:  # type: ignore[override]
        return sorted(self.program.narrowed)

    @property
    def description(self) -> str:  # type: ignore[override]
        exception = f", save {', '.join(self.narrowed)}, which has no float64 kernel" if self.narrowed else ""
        return f"the traced PyTorch program with every float in float64{exception}"

    def __call__(self, feeds: Mapping[str, Array], observe: Observer | None = None) -> list[Array]:
        return self._run(feeds, lift=True, observe=observe)

    def in_own_dtypes(self, feeds: Mapping[str, Array]) -> list[Array]:
        return self._run(feeds, lift=False)

    def _run(self, feeds: Mapping[str, Array], *, lift: bool, observe: Observer | None = None) -> list[Array]:
        from rmsnorm_deploy.runtime.optional import one_line
        from rmsnorm_deploy.runtime.tensors import to_numpy, to_torch

        by_path = {self._paths.get(name, name): to_torch(array) for name, array in feeds.items()}
        values = self.program.bind(by_path)
        try:
            return [to_numpy(tensor) for tensor in self.program.run(values, lift=lift, observe=observe)]
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            where = " in float64" if lift else ""
            raise InputError(f"the traced program does not run{where}: {one_line(error)}") from error


class OnnxOracle(Oracle):
    """The unfused file of an ONNX source."""

    def __init__(self, path: Path) -> None:
        from rmsnorm_deploy.parity.lift_onnx import OnnxProgram

        self._program = OnnxProgram(path)
        self.narrowed = self._program.narrowed
        names = ", ".join(self.narrowed)
        exception = f", save {names}, which has no float64 definition (ONNX Runtime, float32)" if names else ""
        self.description = f"{path.name} with every float in float64{exception}, run by {self._program.engine}"

    def __call__(self, feeds: Mapping[str, Array], observe: Observer | None = None) -> list[Array]:
        return self._program.run(dict(feeds))


def open_oracle(bundle: BundleLike) -> Oracle:
    """The truth of ``bundle``: its traced program, else its unfused ONNX file.

    Raises:
        InputError: the bundle has neither, or what it has cannot be lifted.
    """
    program = bundle.program()
    if program is not None:
        return TorchOracle(program, bundle.manifest["signature"])
    if bundle.reference_path is not None:
        return OnnxOracle(bundle.reference_path)
    raise InputError(f"{bundle.path} holds neither program.pt2 nor reference.onnx: export the model again")
