"""`rounds`: samples answers with the current weights, scores them, trains on them, and begins again."""
