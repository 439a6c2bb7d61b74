"""What `train.py` is made of."""
