"""Checkpoints: each rank writes its own part, complete or absent at every moment, read under any other strategy.

`tensors` is the format, `folder` the life of a checkpoint on disk, `saver` writes one, `resume` chooses and restores
one, `export` makes a Hugging Face folder of it. Only safetensors and JSON: reading one runs no code.
"""
