"""`python -m cookbook`: see cookbook/commands/cli.py."""

import sys


def main() -> int:
    """Runs one command. Ctrl-C while it is imported ends quietly too."""
    try:
        from cookbook.system.masking import mask_streams

        mask_streams()
        from cookbook.commands.cli import main
        from cookbook.system.imports import quiet_libraries

        quiet_libraries()
        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
