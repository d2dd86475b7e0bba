"""The interface that every backend has, and what a session needs of a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rmsnorm_deploy.runtime.binding import bind_call
from rmsnorm_deploy.runtime.signature import Signature, check_feeds
from rmsnorm_deploy.runtime.tensors import Array, to_numpy

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class BundleLike(Protocol):
    """The part of `rmsnorm_deploy.Bundle` that sessions read."""

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def model_path(self) -> Path: ...

    @property
    def eager(self) -> torch.nn.Module | None: ...

    def program(self) -> ExportedProgram | None: ...


class Session(ABC):
    """A model, loaded and ready to run. A session may be used from several threads at once.

    ``session(*args, **kwargs)`` is the model's own call and gives its outputs, flattened in order, as torch tensors of
    torch's dtypes. ``session.run(feeds)`` takes arrays by input name and gives arrays by output name: torch tensors
    if a torch tensor was fed, numpy arrays (bfloat16 as ml_dtypes.bfloat16) otherwise.
    """

    backend: str

    def __init__(self, bundle: BundleLike) -> None:
        self.signature = Signature.from_manifest(bundle.manifest)

    @property
    def input_names(self) -> list[str]:
        return [spec.name for spec in self.signature.inputs]

    @property
    def output_names(self) -> list[str]:
        return [spec.name for spec in self.signature.outputs]

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Call the model as it was called at export.

        Raises:
            InputError: an argument is missing, unexpected, of another dtype or shape, or differs from a value that was
                fixed at export.
        """
        feeds = bind_call(self.signature, args, kwargs)
        check_feeds(self.signature, feeds)
        return self._execute(feeds)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run on arrays by input name.

        Raises:
            InputError: a name is missing or unexpected, or an array has another dtype or shape than the model.
        """
        check_feeds(self.signature, feeds)
        outputs = self._execute(feeds)
        as_torch = any(isinstance(array, torch.Tensor) for array in feeds.values())
        return {
            name: tensor if as_torch else to_numpy(tensor)
            for name, tensor in zip(self.output_names, outputs, strict=True)
        }

    @abstractmethod
    def _execute(self, feeds: Mapping[str, Array]) -> list[torch.Tensor]:
        """Run on checked arrays, one for each input; the outputs in the manifest's order."""
