"""The form of each record in a run's folder, by which it is read: what does not have it is damaged.

A newer version's record may have keys of its own, which are passed over.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cookbook.system.record_files import read_json, read_lines
from cookbook.system.step_phases import PARTS

Number = Annotated[float, Field(ge=-1e300, le=1e300)]
"""A number of any run: sums and squares of a few are still numbers."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
Time = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since 1970."""


Seconds = Annotated[float, Field(gt=0, le=1e12)]
ABSENT: Any = None
"""Default of a part that may be missing; where it is there, it is not null."""


class Form(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True)


class Line(Form):
    """A line of metrics.jsonl: numbers by their names, null where one was not finite."""

    __pydantic_extra__: dict[str, Number | None]
    step: Count
    eval_set: str = ""
    epoch: Number = 0.0
    num_tokens: Number = 0
    learning_rate: Number = 0.0
    peak_memory_gib: Number = 0.0
    step_seconds: Seconds = 1.0
    tokens_per_second: Seconds = 1.0
    data_seconds: Number = 0.0
    eval_seconds: Number = 0.0
    save_seconds: Number = 0.0
    mfu: Number = 0.0
    price: Number = 0.0

    @model_validator(mode="after")
    def _is_whole(self):
        if "loss" in self.__pydantic_extra__ and "epoch" not in self.model_fields_set:
            raise ValueError("has a loss and no epoch")
        return self


class Event(Form):
    __pydantic_extra__: dict[str, Number | str | bool | list[Any] | dict[str, Number] | None]
    event: str
    time: Time
    step: Count
    reason: str | None = None
    reasons: list[str] = []


class Sample(Form):
    step: Count
    prompt: str
    completion: str
    round: Count = ABSENT
    reward: Number = ABSENT


class OfGpu(Form):
    __pydantic_extra__: dict[str, Number | str | list[Number | str] | None]
    rank: Count


class Measurement(Form):
    """A line of monitor.jsonl."""

    time: Time
    gpus: list[OfGpu] = []
    cpu: dict[str, Number | None] = {}


class UsedStrategy(Form):
    file: str
    processes: Annotated[int, Field(gt=0, lt=2**31)]
    kind: str | None = None


class Hardware(Form):
    cores: Count | None
    gpu: str = ""


class OfMemory(Form):
    allocated: Number
    moment: str = ""
    needed: list[Number] = Field(default=[], min_length=2)
    parts: dict[str, Number] = {}
    reserved: list[Number] = Field(default=[], min_length=2)


class OfPart(Form):
    name: str
    low: Number
    high: Number


class OfTime(Form):
    """The forecast of a step's time, or why there is none."""

    none: str | None = None
    low: Number = 0.0
    high: Number = 0.0
    parts: list[OfPart] = []

    @model_validator(mode="after")
    def _is_whole(self):
        if self.none is None and not {"low", "high", "parts"} <= self.model_fields_set:
            raise ValueError("has neither times nor a reason")
        return self


class Padding(Form):
    is_on: bool = False
    can_pack: bool = False
    why: str | None = None
    padding: Number | None = None


class BestBy(Form):
    """The metric of `run.metric_for_best_model`."""

    metric: str
    greater_is_better: bool


class OfRows(Form):
    """Digests of the rows that a run reads."""

    train: str | None = None
    held_out: dict[str, str] = {}


class Record(Form):
    """run.json."""

    strategy: UsedStrategy
    hardware: Hardware
    command: list[str] = []
    versions: dict[str, str | None] = {}
    written_settings: list[str] = []
    max_steps: Count | None = None
    machines: Annotated[int, Field(gt=0, lt=2**31)] = 1
    header: dict[str, str] = {}
    forecast: OfMemory = ABSENT
    step_forecast: OfTime = ABSENT
    packing: Padding = ABSENT
    best_by: BestBy | None = None
    rows: OfRows = ABSENT
    resumed_from: str | None = None


class State(Form):
    """status.json."""

    state: str
    step: Count = 0
    exit_code: int | None = None
    reason: str | None = None
    checkpoint: str | None = None
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    host: str | None = None
    started: Time | None = None
    launch: str | None = None
    failed_after: list[Count] = []
    price: Number = ABSENT


class OfRank(Form):
    """profile/rank_R.json."""

    rank: Count
    first_step: Count
    last_step: Count
    seconds: Seconds
    hidden: Number
    phases: dict[str, dict[str, Number]]
    operations: dict[str, Number]
    communications: dict[str, Number]
    layers: dict[str, dict[str, Number]]

    @model_validator(mode="after")
    def _is_whole(self):
        if any({*PARTS} - parts.keys() for parts in self.phases.values()):
            raise ValueError(f"has not all of {', '.join(PARTS)} in a phase")
        return self


def damage(values: Any, form: type[Form]) -> str | None:
    """Describe why values are not of a form; None if they are."""
    try:
        form.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "it"
        is_bound = problem["type"] in ("less_than", "less_than_equal", "greater_than", "greater_than_equal")
        return f"{place}: {'a number that no run has' if is_bound else problem['msg']}"
    return None


def read_form(path: Path, form: type[Form]) -> tuple[dict[str, Any], str | None]:
    """The object in a file, empty if there is none, and a note if it is damaged, which leaves it out."""
    if not os.path.lexists(path):
        return {}, None
    values = read_json(path)
    why = damage(values, form) if values else "no JSON object" if path.is_file() else "no plain file"
    return ({}, f"{path}: is damaged, and left out ({why})") if why else (values, None)


def read_lines_of(path: Path, form: type[Form]) -> tuple[list[dict[str, Any]], str | None]:
    """The objects of a file of JSON lines, and a note if some are damaged, which leaves them out. The last line of a
    running run may be cut, and is no damage.
    """
    if os.path.lexists(path) and not path.is_file():
        return [], f"{path}: is damaged, and left out (no plain file)"
    lines = read_lines(path, None)
    whys = [damage(line, form) for line in lines]
    wrong = [why for why in whys if why is not None]
    note = f"{path}: {len(wrong)} lines are damaged, and left out (the first: {wrong[0]})" if wrong else None
    return [line for line, why in zip(lines, whys, strict=True) if why is None], note
