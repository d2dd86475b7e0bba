"""``python -m rmsnorm_deploy.inspect MODEL``: every norm of a model, and every look-alike that was left."""

from __future__ import annotations

import sys

from rmsnorm_deploy.inspect.cli import main

if __name__ == "__main__":
    sys.exit(main())
