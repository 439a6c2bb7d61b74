"""Opens the export of a rehearsal with plain transformers and peft, none of our code, and computes their own loss."""

import math
from pathlib import Path
from typing import Any

from cookbook.config.objectives import Answer, Objective, Question
from cookbook.config.sections import DataSection, Source
from cookbook.rows.row_kinds import BadRow, kinds
from cookbook.training.data.encode import Encoder, LabelledIds, TextKeys
from cookbook.training.data.rows import read_rows


def recompute(export: Path, small: dict[str, Any], objective: Objective, eval_file: Path) -> float:
    """The evaluation loss of the exported model by transformers' own loss function and the export's tokenizer."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    model, reference = _reopen(export, small, objective.num_scores)
    teacher: Any = None if objective.asks is None else _opened(small["objective"]["teacher"])
    rows = read_rows(Source(path=str(eval_file)), "error", objective, place="data.eval")
    length, is_bf16 = small["data"]["max_length"], small["mixed_precision"] in ("bf16", "fp8")

    def logp(network: Any, sequence: LabelledIds) -> tuple[float, int]:
        """Sum over the labelled tokens, and their number."""
        ids, is_label = (torch.tensor([part[:length]]) for part in sequence)
        labels = torch.where(is_label.bool(), ids, -100)
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            return -network(input_ids=ids, labels=labels).loss.item() * count, count

    def token_logps(network: Any, sequence: LabelledIds) -> list[float]:
        ids, is_label = (torch.tensor(part[:length]) for part in sequence)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            logits = network(input_ids=ids[None]).logits[0, :-1].float()
        found = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        return found[is_label[1:].bool()].tolist()

    def teacher_logps(sequence: LabelledIds, asked: Question) -> list[tuple[list[float], list[float]]]:
        ids, is_label = (torch.tensor(part[:length]) for part in sequence)
        found = []
        for network in (teacher, model):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                logits = network(input_ids=ids[None]).logits[0, :-1].double()
            found.append(torch.log_softmax(logits[is_label[1:].bool()] / asked.temperature, -1))
        likeliest = found[0].topk(asked.top_k, -1).indices
        by_teacher, by_model = (one.gather(1, likeliest).tolist() for one in found)
        return list(zip(by_teacher, by_model, strict=True))

    def scores(sequence: LabelledIds) -> list[float]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            return model(input_ids=torch.tensor([sequence[0][:length]])).logits[0].float().tolist()

    def answer(sequence: LabelledIds) -> Answer:
        if objective.num_scores is not None:
            return Answer(math.nan, 1, math.nan, scores=scores(sequence))
        total, count = logp(model, sequence)
        if objective.asks is not None:
            return Answer(total, count, math.nan, token_teacher_logps=teacher_logps(sequence, objective.asks))
        if objective.reference_of == "tokens":
            by_model, by_reference = (token_logps(network, sequence) for network in (model, reference))
            return Answer(total, count, math.nan, by_model, by_reference)
        return Answer(total, count, logp(reference, sequence)[0] if objective.needs_reference else math.nan)

    encoded = Encoder(
        tokenizer, objective.labels, TextKeys.of(DataSection.model_validate({"train": str(eval_file)} | small["data"]))
    ).encode(rows)
    samples, groups = [], []
    kind, size = kinds()[rows.kind], len(objective.sequences)
    for row, sample in zip(rows.rows, encoded, strict=True):
        if not isinstance(sample, BadRow) and _is_trained(sample.sequences, length, size):
            answers = [answer(sequence) for sequence in sample.sequences]
            samples += [answers[start : start + size] for start in range(0, len(answers), size)]
            groups.append(kind.values(row) if kind.values else [kind.value(row) if kind.value else math.nan])
    return objective.by_hand(samples, objective.values_of(groups))


def _is_trained(sample: list[LabelledIds], length: int, size: int) -> bool:
    """Whether the run keeps a sample truncated to this length; transformers' mean over no label would be nan."""
    if not all(any(is_label[1:length]) for _, is_label in sample):
        return False
    return size == 1 or sample[0][0][:length] != sample[1][0][:length]


def _reopen(export: Path, small: dict[str, Any], num_scores: int | None) -> tuple[Any, Any]:
    """The exported model and the untrained one, loaded as any user would.

    Args:
        num_scores: of the objective.

    Raises:
        RuntimeError: a tensor of the adapter is empty.
    """
    import torch
    from transformers import BitsAndBytesConfig

    adapter = small.get("adapter")
    if adapter is None:
        untrained = small["model"].get("name_or_path")  # absent for a new model, which needs no reference
        return _opened(export, num_scores), _opened(untrained, num_scores) if untrained else None
    from peft import PeftConfig, PeftModel
    from safetensors.torch import load_file

    empty = [name for name, tensor in load_file(export / "adapter_model.safetensors").items() if not tensor.numel()]
    if empty:
        raise RuntimeError(f"the exported adapter has empty tensors: {', '.join(empty[:5])}")
    base = PeftConfig.from_pretrained(str(export)).base_model_name_or_path
    options: dict[str, Any] = {}
    if adapter["name"] == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if small["mixed_precision"] == "bf16" else torch.float32,
        )
    bases = [_opened(base, num_scores, **options) for _ in range(2)]
    for module in (module for model in bases for module in model.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # such kernels want widths that small models have not
    if options:
        for model in bases:
            round_experts(model)
    return PeftModel.from_pretrained(bases[0], str(export)).eval(), bases[1]


def _opened(folder: str | Path, num_scores: int | None = None, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForCausalLM if num_scores is None else AutoModelForSequenceClassification
    options |= {} if num_scores is None else {"num_labels": num_scores}
    found = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, **options)
    return found.eval()


def round_experts(model: Any) -> None:
    """Give stacked experts the values that bitsandbytes' 4 bits have, which transformers puts into linear layers alone.
    In place.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.modules():
        for parameter in module.parameters(recurse=False) if hasattr(module, "is_transposed") else ():
            if parameter.ndim == 3:
                stored = quantize_4bit(parameter.data, quant_type="nf4", compress_statistics=True)
                parameter.data = dequantize_4bit(*stored)
