"""Metrics of tests/test_metric_functions.py."""

from cookbook.config.metric_functions import metric


@metric
def hits(logits, labels):
    return logits.argmax() == labels


@metric
def third(logits, labels):
    return logits.rank(labels) < 3


@metric
def hits_of_odd(logits, labels):
    is_odd = labels % 2 == 1
    return (logits.argmax() == labels) & is_odd, is_odd


@metric(greater_is_better=False)
def surprise(logits, labels):
    return logits.nll(labels)


@metric
def regret(logits, labels):
    """The same, as if more of it were better."""
    return logits.nll(labels)


@metric
def of_micro_batches(logits, labels):
    """The mean over micro-batches of a mean: what a metric must not be."""
    share = labels.new_ones(len(labels)) / max(1, len(labels))
    return (logits.argmax() == labels) * share, share


@metric
def of_none(logits, labels):
    return labels * 0, labels * 0


@metric
def one_number(logits, labels):
    return logits.nll(labels).mean()


@metric
def of_all_logits(logits, labels):
    return logits.whole().max(1).values
