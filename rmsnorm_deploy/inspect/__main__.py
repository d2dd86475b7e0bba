"""``python -m rmsnorm_deploy.inspect MODEL``: every norm of a model, and every look-alike that was left.

Exit status: 0 all right; 1 a family of the zoo (--zoo) has a norm unfused or a wrong value; 2 bad input or usage; 70 a
fault of this program; 130 interrupted.
"""

from __future__ import annotations

import sys

from rmsnorm_deploy.inspect.cli import main

if __name__ == "__main__":
    sys.exit(main())
