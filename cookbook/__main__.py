"""`python -m cookbook`: see cookbook/cli.py."""

import sys

from cookbook.cli import main

sys.exit(main())
