"""``python -m rmsnorm_deploy.engine BUNDLE``."""

from __future__ import annotations

import sys

from rmsnorm_deploy.engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
