"""Models and tokenizers: from the Hub, from a folder, or new ones.

`language_model` loads a model with its loss inside (`loss`) and, for packed rows, attention of ours (`attention`);
`efficiency` makes it faster or smaller with equal results.
"""
