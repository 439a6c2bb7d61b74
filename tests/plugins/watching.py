"""Metrics of tests/test_metric_functions.py, and callbacks of tests/test_callbacks.py."""

import gc
import json
import os
import random

from cookbook.config.callbacks import callback
from cookbook.config.metric_functions import metric


@metric
def writes_to_labels(logits, labels):
    labels.zero_()
    return labels


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


@metric
def of_a_missing_name(logits, labels):
    return logits.no_such_thing(labels)


@metric(answers=5, tokens=8)
def as_written(prompt, answer, reference):
    """Letters of an answer that are those of the held-out one, in the length of both and the prompt's."""
    return sum(map(str.__eq__, answer, reference)), len(answer) + len(reference) + len(prompt)


@metric(answers=3, tokens=4, greater_is_better=False)
def length(prompt, answer, reference):
    return len(answer)


@metric(answers=2)
def no_number(prompt, answer, reference):
    return answer


@callback
class Notes:
    """Writes down what it gets."""

    def __init__(self, folder):
        self.file = folder / "notes.jsonl"

    def _note(self, kind, line):
        with self.file.open("a") as file:
            file.write(json.dumps([kind, line]) + "\n")
        line.clear()  # its own copy

    def on_event(self, event):
        self._note("event", event)

    def on_metrics(self, line):
        self._note("metrics", line)


@callback
class Fails:
    def __init__(self, folder):
        self.calls = 0

    def on_metrics(self, line):
        self.calls += 1
        if self.calls > 1:
            raise KeyError("a key that is not there")


@callback
class Exits:
    def __init__(self, folder): ...

    def on_metrics(self, line):
        raise SystemExit(0)


def optimizers():
    import torch

    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


@callback
class WritesMoments:
    def __init__(self, folder): ...

    def on_metrics(self, line):
        for optimizer in optimizers():
            for state in optimizer.state.values():
                next(iter(state.values())).zero_()


@callback
class SetsTheRate:
    def __init__(self, folder): ...

    def on_event(self, event):
        for optimizer in optimizers():
            optimizer.param_groups[0]["lr"] = 1.0


@callback
class Moves:
    def __init__(self, folder):
        os.chdir(folder)

    def on_event(self, event): ...


@callback
class FailsAtOnce:
    def __init__(self, folder):
        raise OSError("no place")

    def on_event(self, event): ...


def weights():
    """The parameters of the process, as a callback is not given them."""
    import torch

    parameters = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter)]
    held = [getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter)) for parameter in parameters]
    # FSDP2 has emptied the storage of what it gathered.
    return [tensor for tensor in held if tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()]


@callback
class WritesWeights:
    def __init__(self, folder): ...

    def on_metrics(self, line):
        for parameter in weights():
            parameter.data.mul_(1.001)


@callback
class WritesLater:
    def __init__(self, folder): ...

    def on_metrics(self, line):
        import torch

        if line["step"] == 2:
            with torch.no_grad():
                for parameter in weights():
                    parameter.mul_(1.001)


@callback
class DrawsOfTorch:
    def __init__(self, folder): ...

    def on_metrics(self, line):
        import torch

        if line["step"] == 2:
            torch.rand(1)


@callback
class DrawsOfNumpy:
    def __init__(self, folder): ...

    def on_event(self, event):
        import numpy as np

        np.random.rand()


@callback
class DrawsOfPython:
    def __init__(self, folder):
        random.random()

    def on_event(self, event): ...


@callback
class DrawsOfItsOwn:
    def __init__(self, folder):
        self.random = random.Random(3)

    def on_event(self, event):
        self.random.random()
