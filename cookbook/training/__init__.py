"""Parts that `train.py` is made of."""
