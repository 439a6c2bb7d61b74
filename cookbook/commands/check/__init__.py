"""`check`: recipes with their strategies, before anything is started."""
