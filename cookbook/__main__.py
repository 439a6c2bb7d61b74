"""`python -m cookbook`: see cookbook/commands/cli.py."""

import sys


def main() -> int:
    """Runs one command. Ctrl-C while it is imported ends quietly too; another Python than that of .venv is named."""
    try:
        try:
            from cookbook.commands.cli import main
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("cookbook"):
                raise
            advice = "first: source .venv/bin/activate (docs/install.md)"
            print(f"{sys.executable} has no {error.name}; {advice}", file=sys.stderr)
            return 2
        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
