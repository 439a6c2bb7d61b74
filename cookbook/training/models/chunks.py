"""Sizes of the chunks of the logits that a loss computes at a time. Loads neither torch nor transformers."""

LOGITS_BUDGET = 2**27
"""Largest number of logits in one matrix product of the forward. With the float32 copy and the log-probabilities they
take 1.25 GiB in bf16. Below it, a single product is fastest."""
OF_BACKWARD = 2
"""Times as many in the backward of the likelihood in bf16."""
OF_FROZEN = 4
"""Times fewer of a head that is not trained, where smaller chunks repeat no product."""
