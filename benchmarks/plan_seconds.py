"""How long `cookbook plan` takes for the questions of users, in seconds and seconds of processor.

    python benchmarks/plan_seconds.py [--times 3] [--quick] [--page]

Writes benchmarks/results/plan_seconds.json and the table of docs/plan.md: of each question the least of so many runs,
one after another, in processes of their own, first in an empty folder and then again there, where the first has left
its traces. On a busy machine all are more than on an idle one, so the load is in the record. --quick asks one question
once, and writes nothing; --page makes the table of the record.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records import dump, processor  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "plan_seconds.json", ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- plan_seconds:begin -->\n", "<!-- plan_seconds:end -->\n"
PACKAGES = ("torch", "transformers", "peft")
MEASURED = ("seconds", "processor", "again")
"""Seconds of a question, seconds of processor, and those of the same question once more."""

QWEN3_32B = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
)
QWEN35_27B = dict(
    model_type="qwen3_5_text",
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    linear_num_value_heads=48,
    max_position_embeddings=262144,
)
GEMMA3_27B = dict(
    model_type="gemma3_text",
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=1024,
)
LLAMA_8B, LLAMA_70B = "NousResearch/Meta-Llama-3.1-8B", "unsloth/Meta-Llama-3.1-70B"
QWEN_7B, QWEN3_30B = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B-Base"
LORA, QLORA = {"name": "lora"}, {"name": "qlora"}
MIXTURE = {"name": "lora", "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@dataclass(frozen=True)
class Question:
    """A question to `plan`."""

    words: str
    model: str | dict[str, Any]
    """Its name in recipes/offline_facts.json, or what its configuration has beside transformers' own values."""
    gpus: str
    """With further options."""
    length: int = 2048
    adapter: dict[str, Any] | None = None
    objective: str = "sft"
    batch: int = 32
    is_compiled: bool = False

    def recipe(self, folder: Path) -> dict[str, Any]:
        """The recipe that asks, as `init` writes one: micro-batch and checkpointing by auto where weights are frozen.

        Args:
            folder: of the model, if its name is not known.
        """
        is_full = self.adapter is None
        rows = "trl-lib/ultrafeedback_binarized" if self.objective == "dpo" else "python-stdlib"
        return {
            "strategy": "fsdp2",
            "mixed_precision": "bf16",
            "model": {
                "name_or_path": self.model if isinstance(self.model, str) else str(folder),
                "gradient_checkpointing": True if is_full else "auto",
                "compile": self.is_compiled,
            },
            "data": {"train": rows, "max_length": self.length},
            "objective": {"name": self.objective},
            **({} if is_full else {"adapter": self.adapter}),
            "batch": {"global_batch_size": self.batch, "micro_batch_size": 1 if is_full else "auto"},
            "optim": {"learning_rate": 1e-5},
            "run": {"max_steps": 100, "output_dir": "out"},
        }


QUESTIONS = [
    Question("Llama-3.1-8B, all weights, 8k tokens", LLAMA_8B, "4xA100", length=8192),
    Question("Llama-3.1-70B, QLoRA", LLAMA_70B, "2xRTX4090", adapter=QLORA),
    Question("Qwen3-30B-A3B, LoRA", QWEN3_30B, "1xH100", adapter=MIXTURE),
    Question("gpt-oss-20b, LoRA", "unsloth/gpt-oss-20b-BF16", "1x80GB", adapter=LORA),
    Question("Gemma-3-27B, all weights, 32k tokens", GEMMA3_27B, "8xH100", length=32768),
    Question("Qwen2.5-7B, LoRA", QWEN_7B, "1xRTX4090", adapter=LORA),
    Question("Qwen3-30B-A3B, QLoRA", QWEN3_30B, "1xRTX4090", adapter=QLORA | {"targets": MIXTURE["targets"]}),
    Question("gpt-oss-120b, LoRA", {"model_type": "gpt_oss"}, "8xH100", adapter=LORA),
    Question("Llama-3.1-70B, all weights", LLAMA_70B, "8xH200 --host-gib 2000"),
    Question("Qwen3-32B, LoRA", QWEN3_32B, "2xA6000", adapter=LORA),
    Question("Qwen3.5-27B, LoRA", QWEN35_27B, "1xRTX-PRO-6000", adapter=LORA),
    Question("Llama-3.1-8B, all weights, 8k tokens", LLAMA_8B, "1xRTX5090 --host-gib 192", length=8192),
    Question("Qwen2.5-7B, LoRA", QWEN_7B, "1xT4", adapter=LORA),
    Question("DeepSeek-V3, all weights", {"model_type": "deepseek_v3"}, "32x8xH100", batch=256),
    Question("Qwen3-4B, DPO with LoRA", "Qwen/Qwen3-4B-Base", "1xL4", adapter=LORA, objective="dpo"),
    Question("GLM-4.5-Air, LoRA", {"model_type": "glm4_moe"}, "8xB200", adapter=MIXTURE),
    Question("Llama-3.1-8B, all weights, 128k tokens", LLAMA_8B, "8xH100", length=131072),
    Question(
        "Gemma-3-27B with its image tower, LoRA",
        {"model_type": "gemma3", "text_config": GEMMA3_27B, "vision_config": {"model_type": "siglip_vision_model"}},
        "2xH100",
        adapter=LORA,
    ),
    Question("Qwen3-Next-80B-A3B, LoRA", {"model_type": "qwen3_next"}, "4xH200", adapter=MIXTURE),
    Question("Qwen3-4B, LoRA", "Qwen/Qwen3-4B-Base", "any", adapter=LORA),
    Question("Llama-3.1-70B, all weights, batch of 4,096", LLAMA_70B, "512x8xH100 --strategy hsdp", batch=4096),
    Question("Llama-3.1-8B, ZeRO-2, batch of 16,384", LLAMA_8B, "2048x8xH100 --strategy zero2", batch=16384),
    Question("Llama-3.1-8B, all weights, batch of 1e10", LLAMA_8B, "8xH100", batch=10**10),
    Question("Qwen3-8B, QLoRA, compiled", "Qwen/Qwen3-8B", "1xRTX5090", adapter=QLORA, is_compiled=True),
    Question("Qwen2.5-7B, LoRA", QWEN_7B, "8xMI300X", adapter=LORA),
]


def command(question: Question, folder: Path) -> list[str]:
    """The words of a question, whose files are written to a folder."""
    model = folder / "model"
    if not isinstance(question.model, str):
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(question.model))
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(question.recipe(model)))  # JSON is YAML
    return [sys.executable, "-m", "cookbook", "plan", str(path), "--gpus", *question.gpus.split()]


def seconds(question: Question) -> tuple[float, float, float]:
    """Seconds, and seconds of processor, of the first answer, then seconds of processor of the second, the start of
    each included.

    Raises:
        subprocess.CalledProcessError: it is no answer but a mistake.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = command(question, Path(folder))
        return (*_seconds_of(words, folder), _seconds_of(words, folder)[1])


def _seconds_of(words: list[str], folder: str) -> tuple[float, float]:
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each compiles the package, which a user's second start has
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True)
    if done.returncode not in (0, 1):  # 1: nothing fits
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    after, passed = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(record: dict[str, Any]) -> str:
    """The rows of a record, and with what they were measured."""
    lines = ["| `cookbook plan` | `--gpus` | seconds | of processor | asked again |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        values = " | ".join(f"{row[name]:.1f}" for name in MEASURED)
        lines.append(f"| {row['question']} | `{row['gpus']}` | {values} |")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    load = f"load {record['load'][0]:.0f} to {record['load'][1]:.0f}"
    runs = f"the least of {record['times']} runs" if record["times"] > 1 else "one run each"
    text = (
        f"(`{record['command']}`, {runs}, {record['date']}; {record['cores']} cores of an {record['processor']}, {load}"
    )
    return "\n".join([*lines, "", *textwrap.wrap(f"{text}; {versions}.)", 120)])


def write_page(record: dict[str, Any]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(record)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(RESULTS.read_text(encoding="utf-8")))
        return 0
    if options.quick:
        print(f"{QUESTIONS[-1].words}: {seconds(QUESTIONS[-1])[0]:.1f}")
        return 0
    answers: list[list[tuple[float, float, float]]] = [[] for _ in QUESTIONS]
    loads: list[float] = []
    for _ in range(options.times):
        for question, own in zip(QUESTIONS, answers, strict=True):
            own.append(seconds(question))
            loads.append(os.getloadavg()[0])
            first, processor_first, again = own[-1]
            print(f"{question.words}, {question.gpus}: {first:.1f}, {processor_first:.1f} and {again:.1f} of processor")
    record = {
        "command": f"python benchmarks/plan_seconds.py --times {options.times}",
        "times": options.times,
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": processor(),
        "load": [min(loads), max(loads)],
        "versions": {name: version(name).partition("+")[0] for name in PACKAGES},
        "rows": [
            {"question": question.words, "gpus": question.gpus}
            | {name: round(min(answer[i] for answer in own), 1) for i, name in enumerate(MEASURED)}
            for question, own in zip(QUESTIONS, answers, strict=True)
        ],
    }
    RESULTS.write_text(dump(record) + "\n", encoding="utf-8")
    write_page(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
