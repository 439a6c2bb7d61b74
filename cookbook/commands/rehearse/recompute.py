"""Opens the export of a rehearsal with plain transformers and peft, none of our code, and computes their own loss."""

from pathlib import Path
from typing import Any

from cookbook.config.objectives.token_loss import LabelLoss
from cookbook.config.sections import DataSection, Source
from cookbook.rows.row_kinds import BadRow
from cookbook.training.data.encode import Encoder, TextKeys
from cookbook.training.data.rows import read_rows


def recompute(export: Path, small: dict[str, Any], objective: LabelLoss, eval_file: Path) -> float:
    """The evaluation loss of the exported model by transformers' own loss function and the export's tokenizer."""
    import torch
    from transformers import AutoTokenizer
    from transformers.trainer_pt_utils import LabelSmoother

    tokenizer, model = AutoTokenizer.from_pretrained(export, trust_remote_code=False), _reopen(export, small)
    rows = read_rows(Source(path=str(eval_file)), "error", objective, place="data.eval")
    length, is_bf16 = small["data"]["max_length"], small["mixed_precision"] in ("bf16", "fp8")
    smoother = LabelSmoother(epsilon=objective.label_smoothing)
    encoded = Encoder(
        tokenizer, objective.labels, TextKeys.of(DataSection.model_validate({"train": str(eval_file)} | small["data"]))
    ).encode(rows)
    total, num_tokens = 0.0, 0
    for sample in encoded:
        # The run leaves such a sample out, and transformers' mean over no label would be nan.
        if isinstance(sample, BadRow) or not any(sample.sequences[0][1][1:length]):
            continue
        ids, is_label = (torch.tensor([part[:length]]) for part in sample.sequences[0])
        labels = torch.where(is_label.bool(), ids, -100)
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            output = model(input_ids=ids, labels=labels)
            # Its Trainer asks the model for the loss, or with label smoothing computes it from the logits.
            loss = smoother(output, labels, shift_labels=True) if objective.label_smoothing else output.loss
        total, num_tokens = total + loss.item() * count, num_tokens + count
    return total / num_tokens


def _reopen(export: Path, small: dict[str, Any]) -> Any:
    """The exported model, loaded as any user would.

    Raises:
        RuntimeError: a tensor of the adapter is empty.
    """
    import torch
    from transformers import BitsAndBytesConfig

    adapter = small.get("adapter")
    if adapter is None:
        return _open(export)
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
    model = _open(base, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # such kernels want widths that small models have not
    if options:
        round_experts(model)
    return PeftModel.from_pretrained(model, str(export)).eval()


def _open(folder: str | Path, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options |= {"dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, **options).eval()


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
