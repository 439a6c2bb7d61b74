"""Checkpoints: written by every process without communication, whole or absent, read under any other strategy.

`tensors` is the format, `folder` how a checkpoint comes to be and goes, `saver` writes one, `resume` takes one up, and
`export` makes a Hugging Face folder of it. Only safetensors and JSON: nothing that is read can run code.
"""
