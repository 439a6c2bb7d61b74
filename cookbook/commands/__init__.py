"""Commands that users call."""
