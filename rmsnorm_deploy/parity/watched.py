"""One run of a model for its outputs and for the values at its norms, where showing those does not change the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rmsnorm_deploy.errors import DeployError
from rmsnorm_deploy.parity.backends import Backend, Runner
from rmsnorm_deploy.parity.normcheck import NormChecks, SiteCase
from rmsnorm_deploy.parity.result import Budget
from rmsnorm_deploy.parity.scratch import open_backend
from rmsnorm_deploy.parity.ulp import Array


class Watched:
    """A session that gives the model's ``outputs``, and keeps the values at the norms of the samples of ``cases``."""

    def __init__(self, session: Runner, outputs: Sequence[str], cases: Sequence[SiteCase]) -> None:
        self._session, self._outputs, self._cases = session, outputs, cases
        self._values: dict[int, dict[str, Array]] = {}

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Any]:
        """The outputs by name."""
        values = self._session.run(feeds)
        if any(feeds is case.sample.feeds for case in self._cases):
            self._values[id(feeds)] = {name: np.asarray(value) for name, value in values.items()}
        return {name: values[name] for name in self._outputs}

    def at_norms(self) -> list[dict[str, Array]] | None:
        """Every value at a site and every output, for each case; None if one was not run."""
        if any(id(case.sample.feeds) not in self._values for case in self._cases):
            return None
        return [self._values[id(case.sample.feeds)] for case in self._cases]


def open_watched(
    checks: NormChecks, backend: Backend, cases: Sequence[SiteCase], limits: Mapping[str, Budget]
) -> Watched | None:
    """A session of the whole model; None where a graph that gives more values may be run in another way.

    That is where something optimizes it, and in half types, which ONNX Runtime leaves out between two operators that it
    runs in single precision, unless somebody wants the value.
    """
    narrow = any(budget.computed_in not in ("float32", "float64") for budget in limits.values())
    if backend.options.get("optimization") != "disabled" or narrow or not cases:
        return None
    manifest = checks.bundle.manifest
    try:
        session = open_backend(checks.scratch.tapped(checks.sites.model, manifest, checks.present()), backend)
    except DeployError:
        return None  # what is wrong is told of the model itself
    return Watched(session, [item["name"] for item in manifest["signature"]["outputs"]], cases)
