"""The machine, its processes and files."""
