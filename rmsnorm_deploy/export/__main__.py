"""``python -m rmsnorm_deploy.export MODEL``: the main job from the command line.

Exit status: 0 all right; 1 a backend does not compute what the model computes; 2 bad input or usage; 3 a backend asked
for by name is not on this machine; 70 a fault of this program; 130 interrupted.
"""

from __future__ import annotations

import sys

from rmsnorm_deploy.export.cli import main

if __name__ == "__main__":
    sys.exit(main())
