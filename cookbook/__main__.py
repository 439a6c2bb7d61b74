"""`python -m cookbook`: see cookbook/commands/cli.py."""

import sys

from cookbook.commands.cli import main

sys.exit(main())
