"""What `train.py` calls: the stages before the first step, what surrounds the loop, and what is published at the end."""
