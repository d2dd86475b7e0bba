"""``python -m rmsnorm_deploy.export MODEL``: the main job from the command line."""

from __future__ import annotations

import sys

from rmsnorm_deploy.export.cli import main

if __name__ == "__main__":
    sys.exit(main())
