"""The command line: ``python -m optax_accum plan path/to/file.py:build --memory 16GiB``."""

import sys

from optax_accum._plan.command import main

sys.exit(main(sys.argv[1:]))
