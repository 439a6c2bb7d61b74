"""Parts that `train.py` calls: the stages before the first step, what surrounds the loop, and what a run publishes."""
