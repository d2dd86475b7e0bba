"""Everything in this folder needs an NVIDIA GPU; without one it is skipped, and says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from rmsnorm_deploy.runtime.cuda import no_gpu_reason

    reason = no_gpu_reason()
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
