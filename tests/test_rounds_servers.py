"""Protects a vLLM that stays up over the rounds, and several servers: each samples with the round's weights, or none.

python -m pytest -q tests/test_rounds_servers.py -m "slow or not slow"
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cookbook.commands.rounds.served import Client, ServedModel
from cookbook.config.recipe import load_recipe
from cookbook.config.sections import RoundsSection
from cookbook.system.files import RecipeError
from tests.curves import environment, run_to_end
from tests.stand_in_vllm import StandIn
from tests.test_rounds import LORA, ROUNDS, arguments, forked, logps_of, model, read, settings, start  # noqa: F401
from tests.two_machines import ADDRESSES, two_machines

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def servers(model) -> Iterator[list[StandIn]]:  # noqa: F811
    """Two servers of the model before the first round, which load adapters."""
    started = [StandIn(), StandIn()]
    for server in started:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.serve(str(model))
        server.loads = True
    yield started
    for server in started:
        server.shutdown()
        server.server_close()


def values_of(tmp_path: Path, model: Path, sampler: Any, **others: Any) -> dict[str, str]:  # noqa: F811
    of_adapter = {"adapter": LORA, "optim": {"learning_rate": 0.1}, "schedule": {"name": "constant"}}
    return settings(tmp_path, model, **of_adapter, rounds=ROUNDS | {"sampler": sampler, **others})


def is_of(lines: list[dict[str, Any]], trained: Any) -> bool:
    """True if the log-probabilities of samples are those of a model."""
    pairs = [
        (logps, logps_of(trained, line["prompt_ids"], ids))
        for line in lines
        for ids, logps in zip(line["completion_ids"], line["logprobs"], strict=True)
    ]
    return all(said == pytest.approx(own, abs=1e-4) for said, own in pairs)


def test_servers_load_the_adapter_of_each_round_and_share_its_prompts(
    lab,
    forked,  # noqa: F811
    model,  # noqa: F811
    tmp_path,
    capsys,
    servers,
):
    """Neither is started again; which of them samples a prompt depends on the round and its place."""
    addresses = [server.address for server in servers]
    assert start(lab, values_of(tmp_path, model, addresses)) == 0, capsys.readouterr()
    first, second = (tmp_path / f"out/rounds/{number:04}" for number in (1, 2))
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert is_of(read(first / "samples.jsonl"), base)
    tuned: Any = PeftModel.from_pretrained(base, str(first / "run/export")).eval()
    lines = read(second / "samples.jsonl")
    assert is_of(lines, tuned)
    with tuned.disable_adapter():
        assert not is_of(lines, tuned)
    (name,) = {name for server in servers for _, name in server.told}
    assert Path(name).name == f"model-{lines[0]['weights'][:12]}"
    assert [server.told for server in servers] == [[(LOAD, name), (UNLOAD, name)]] * 2
    assert not [*tmp_path.glob("out/rounds/*/model-*")]
    for number, folder in ((1, first), (2, second)):
        for place, line in enumerate(read(folder / "samples.jsonl")):
            whose = [[request["seed"] for request in server.asked] for server in servers]
            asked = [[seed for seed in line["seeds"] if seed in seeds] for seeds in whose]
            assert asked[(number + place) % 2] == line["seeds"] and asked[(number + place + 1) % 2] == []


LIES = {
    "it ignores what it loads": lambda server, first: server.model,
    "it loads the adapter half": lambda server, first: halfway(server.model, StandIn._open_adapter(server, first)),
}


def halfway(own: Any, other: Any) -> Any:
    for left, right in zip(own.parameters(), other.parameters(), strict=True):
        right.data = (left.data + right.data) / 2
    return other


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_server_that_lies_is_named_before_the_round_asks_it(lab, forked, model, tmp_path, capsys, servers, lie):  # noqa: F811
    honest, liar = servers
    liar.open_adapter = lambda folder: lie(liar, folder)
    # What no earlier weights explain is held against the bound alone.
    bound = 0.05 if lie is LIES["it ignores what it loads"] else 1e-6
    values = values_of(tmp_path, model, [honest.address, liar.address], max_kl_sampler_trainer=bound)
    assert start(lab, values) == 2
    error = capsys.readouterr().err
    assert (
        f"rounds.sampler is {liar.address}: in round 2 kl_sampler_trainer is" in error and honest.address not in error
    )
    assert ("those of " + str(model) in error) == (lie is LIES["it ignores what it loads"])
    asked_in_second = [request for request in liar.asked + honest.asked if request["seed"] > 2000]
    assert len(asked_in_second) == 24  # those of the first round alone
    assert not [*tmp_path.glob("out/rounds/0002/*.jsonl")] and len(forked) == 1
    assert json.loads((tmp_path / "out/status.json").read_text())["exit_code"] == 2
    liar.open_adapter = liar._open_adapter
    assert start(lab, values) == 0, capsys.readouterr()


@contextmanager
def serving(machine: str, address: str, model: Path, *options: str) -> Iterator[str]:  # noqa: F811
    """A server of its own process on one of `two_machines`; its address."""
    program = [sys.executable, str(ROOT / "tests/stand_in_vllm.py"), "serve", str(model), "--enable-lora", *options]
    process = subprocess.Popen(
        ["ip", "netns", "exec", machine, *program, "--host", address, "--port", "8000"],
        env=environment(VLLM_ALLOW_RUNTIME_LORA_UPDATING="True", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert "ready\n" in iter(process.stdout.readline, "")
        yield f"http://{address}:8000"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_servers_on_two_machines_share_the_prompts_and_the_one_that_lies_is_named(lab, model, tmp_path):  # noqa: F811
    """Two network namespaces, which have the disk in common; the command is in one of them."""
    with two_machines() as machines, ExitStack() as opened:
        here = opened.enter_context(serving(machines[0], ADDRESSES[0], model))
        values = values_of(tmp_path, model, [here, f"http://{ADDRESSES[1]}:8000"])
        command = ["ip", "netns", "exec", machines[0], sys.executable, "-m", "cookbook", *arguments(lab, values)]
        with serving(machines[1], ADDRESSES[1], model, "--keeps-its-weights") as liar:
            lied = run_to_end(command, timeout=400, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert lied.returncode == 2, lied.stderr
        assert f"rounds.sampler is {liar}: in round 2 kl_sampler_trainer is" in lied.stderr and here not in lied.stderr
        with serving(machines[1], ADDRESSES[1], model):
            done = run_to_end(command, timeout=400, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, str(tmp_path / "out/rounds/0001/run/export")).eval()
    assert is_of(read(tmp_path / "out/rounds/0002/samples.jsonl"), tuned)


def test_a_server_that_loads_nothing_is_to_be_started_with_the_round(lab, forked, model, tmp_path, capsys, servers):  # noqa: F811
    """One of two that loads no adapters is enough, and both get whole models; of a DoRA adapter they always do."""
    servers[0].loads = False
    assert start(lab, values_of(tmp_path, model, [server.address for server in servers])) == 2
    assert re.search(r"serves \S+; round 1 samples with other weights: start it as `vllm", capsys.readouterr().err)
    servers[0].loads = True
    values = values_of(tmp_path, model, servers[0].address) | {"adapter": json.dumps(LORA | {"name": "dora"})}
    assert start(lab, values | {"run.resume": "never"}) == 2
    assert re.search(r"serves \S+; round 1 samples with other weights: start it as `vllm", capsys.readouterr().err)
    assert not servers[0].told and not servers[1].told


def test_what_a_server_says_of_an_adapter_that_it_refuses_is_told(lab, forked, model, tmp_path, capsys, servers):  # noqa: F811
    server, words = servers[0], "LoRA rank 4 is greater than max_lora_rank 1."
    tell = server.tell
    refusal = json.dumps({"error": {"message": words}})
    server.tell = lambda path, asked: (500, refusal) if asked else tell(path, asked)  # type: ignore[method-assign]
    assert start(lab, values_of(tmp_path, model, server.address)) == 2
    error = capsys.readouterr().err
    assert f"rounds.sampler is {server.address}, and it answered 500 to {LOAD}: {words}" in error


# As vLLM 0.32.0 describes them.
PENALTIES = {
    "repetition_penalty": {},
    "presence_penalty": {},
    "frequency_penalty": {},
    "length_penalty": {"default": 1},
}


OTHERS = {key: {} for key in ("temperature", "top_k", "top_p", "min_p", "seed", "user", "suffix")}


@pytest.mark.parametrize("name", ["novelty_penalty", "typical_p", "no_repeat_ngram_size"])
def test_a_server_with_a_setting_that_is_not_known_is_refused(name, model, servers):  # noqa: F811
    """vLLM fills in what a model's folder proposes, for names that it chooses."""
    server, section = servers[0], RoundsSection(num_rounds=1, prompts_per_round=1)
    for server.fields in (None, {}, PENALTIES | OTHERS | {name: {"default": 1}}):
        ServedModel(model, section, Client(server.address, ""), 1)
    server.fields = PENALTIES | OTHERS | {name: {"anyOf": []}}
    with pytest.raises(RecipeError, match=f"has requests with {name}, which"):
        ServedModel(model, section, Client(server.address, ""), 1)


def program_of(tmp_path: Path) -> Path:
    """A program of the name vllm, which notes how it is started, and the mode of its socket's folder."""
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/starts\nstat -c %a "$(dirname "$4")" >>{tmp_path}/modes\n'
        f'exec {sys.executable} {ROOT}/tests/stand_in_vllm.py "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_vllm_stays_up_and_ends_with_the_command(lab, forked, model, tmp_path, capsys, monkeypatch, max_staleness):  # noqa: F811
    """By a program of that name, which transformers answers for; the samples are those of a server for each round."""
    monkeypatch.setenv("PATH", f"{program_of(tmp_path).parent}:/usr/bin:/bin")
    samples = {}
    for name in ("vllm", "vllm --enable-lora"):
        values = values_of(tmp_path, model, name, num_rounds=3, max_staleness=max_staleness)
        values["run.output_dir"] = str(tmp_path / name)
        assert start(lab, values) == 0, capsys.readouterr()
        samples[name] = [
            [line["completion_ids"] for line in read(tmp_path / name / f"rounds/{number:04}/samples.jsonl")]
            for number in (1, 2, 3)
        ]
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == 3 + 1 and f"serve {model} " in starts[-1] and "--max-lora-rank 8 --max-loras 1" in starts[-1]
    assert samples["vllm"] == samples["vllm --enable-lora"]
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]


def whole_values_of(tmp_path: Path, model: Path, sampler: Any, **others: Any) -> dict[str, str]:  # noqa: F811
    return settings(tmp_path, model, optim={"learning_rate": 0.03}, rounds=ROUNDS | {"sampler": sampler, **others})


def test_servers_load_the_whole_weights_of_each_round(lab, forked, model, tmp_path, capsys, servers):  # noqa: F811
    """They are asked as vLLM is by its development mode, and forget what they computed with the weights before."""
    for server in servers:
        server.reloads, server.loads = True, False
    assert start(lab, whole_values_of(tmp_path, model, [server.address for server in servers])) == 0, (
        capsys.readouterr()
    )
    exports = [model, tmp_path / "out/rounds/0001/run/export"]
    opened = [AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32) for export in exports]
    names = []
    for number in (1, 2):
        lines = read(tmp_path / f"out/rounds/{number:04}/samples.jsonl")
        assert [is_of(lines, network) for network in opened] == [number == 1, number == 2]
        names.append(f"model-{lines[0]['weights'][:12]}")
    for server in servers:
        assert [(path, Path(folder).name) for path, folder in server.told] == [
            ("/collective_rpc", name) for name in names
        ]
    both = [{tuple(line["prompt_ids"]) for line in read(path)} for path in tmp_path.glob("out/rounds/*/samples.jsonl")]
    assert both[0] & both[1]  # so that a cache that was kept would tell


def ignores_weights(server: StandIn) -> None:
    server.reload = lambda folder: None  # type: ignore[method-assign]


def keeps_cache(server: StandIn) -> None:
    server.empty_cache = lambda: True  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [ignores_weights, keeps_cache])
def test_one_of_two_that_says_it_took_the_weights_is_named(lab, forked, model, tmp_path, capsys, servers, lie):  # noqa: F811
    honest, liar = servers
    honest.reloads = liar.reloads = True
    lie(liar)
    # What no earlier weights explain, as a mixture, is held against the bound alone.
    bound = 0.05 if lie is ignores_weights else 1e-6
    values = whole_values_of(tmp_path, model, [honest.address, liar.address], max_kl_sampler_trainer=bound)
    assert start(lab, values) == 2
    error = capsys.readouterr().err
    assert f"rounds.sampler is {liar.address}: in round 2 kl_sampler_trainer is" in error
    assert honest.address not in error and (f"those of {model}" in error) == (lie is ignores_weights)
    (digest, folder) = re.findall(r"asked for was (\w+), (\S+)", error)[0]
    assert (
        Path(liar.told[-1][1]).name == f"model-{digest[:12]}"
        and Path(folder) == tmp_path / "out/rounds/0001/run/export"
    )
    asked_in_second = [request for request in liar.asked + honest.asked if request["seed"] > 2000]
    assert len(asked_in_second) == 24  # those of the first round alone
    assert not [*tmp_path.glob("out/rounds/0002/*.jsonl")] and len(forked) == 1
    for name in ("reload", "empty_cache"):
        vars(liar).pop(name, None)
    assert start(lab, values) == 0, capsys.readouterr()


def test_a_server_that_does_not_take_weights_says_so(lab, forked, model, tmp_path, capsys, servers):  # noqa: F811
    server = servers[0]
    server.reloads, server.loads = True, False
    values = whole_values_of(tmp_path, model, server.address)
    server.empty_cache = lambda: False  # type: ignore[method-assign]
    assert start(lab, values) == 2
    assert f"{server.address}, and it keeps keys and values of the weights before" in capsys.readouterr().err
    refusal = json.dumps({"error": {"message": "Call to collective_rpc method failed"}})
    server.tell = lambda path, asked: (500, refusal)  # type: ignore[method-assign]
    assert start(lab, values) == 2
    error = capsys.readouterr().err
    assert f"{server.address}, and it answered 500 to /collective_rpc: Call to collective_rpc method" in error


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_vllm_takes_the_weights_of_all_rounds(lab, forked, model, tmp_path, capsys, monkeypatch, max_staleness):  # noqa: F811
    """Its socket lies where nobody else may look; samples and weights are those of a server for each round."""
    monkeypatch.setenv("PATH", f"{program_of(tmp_path).parent}:/usr/bin:/bin")
    samples, exports = {}, []
    for is_kept in (False, True):
        values = whole_values_of(
            tmp_path, model, "vllm", num_rounds=3, max_staleness=max_staleness, keep_server=is_kept
        )
        values["run.output_dir"] = str(tmp_path / str(is_kept))
        assert start(lab, values) == 0, capsys.readouterr()
        samples[is_kept] = [
            [line["completion_ids"] for line in read(tmp_path / str(is_kept) / f"rounds/{number:04}/samples.jsonl")]
            for number in (1, 2, 3)
        ]
        exports.append((tmp_path / str(is_kept) / "export/model.safetensors").read_bytes())
    starts = (tmp_path / "starts").read_text().splitlines()
    assert samples[False] == samples[True] and exports[0] == exports[1]
    assert len(starts) == 3 + 1 and f"serve {model} --uds " in starts[-1] and "--port" not in starts[-1]
    socket = Path(starts[-1].split(" --uds ")[1].split()[0])
    assert (tmp_path / "modes").read_text().split()[-1] == "700" and not socket.parent.exists()
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]


def test_a_vllm_that_cannot_take_weights_is_no_server_to_keep(lab, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    """As one that knows no development mode."""
    program = program_of(tmp_path)
    program.write_text(program.read_text().replace("exec ", "exec env -u VLLM_SERVER_DEV_MODE "))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert start(lab, whole_values_of(tmp_path, model, "vllm", keep_server=True)) == 2
    error = capsys.readouterr().err
    assert "rounds.sampler is vllm, and it has no /collective_rpc" in error and "take keep_server out" in error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["rounds.keep_server=true"], "rounds.sampler is transformers, so no server is started"),
        (["rounds.keep_server=true", "rounds.sampler=http://a:1"], "rounds.sampler is http://a:1, so no server is"),
        (["rounds.sampler=unix:vllm"], "is 'unix:vllm'; write the address of a server"),
        (["rounds.sampler=unix://a/b"], "is 'unix://a/b'; write the address of a server"),
        (["rounds.sampler=vllm --enable-lora"], "the recipe has no adapter; take it out"),
        (["rounds.sampler=vllm --enable-lora", "adapter={name: dora}"], "adapter.name is dora; take it out"),
        (["rounds.sampler=[http://a:1, http://a:1]"], "has http://a:1 twice"),
        (["rounds.sampler=[http://a:1, vllm]"], "is 'vllm'; write the address of a server"),
        (["rounds.sampler=http://a:1 b:1"], "is 'b:1'; write the address of a server"),
    ],
)
def test_a_mistake_in_servers_is_told(changed: list[str], message: str):
    from cookbook.start import run_plan

    def plan() -> None:
        recipe, strategy = run_plan.load_pair(ROOT / "recipes/sums/grpo.yaml", changed, None)
        run_plan.make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="grpo.yaml")

    with pytest.raises(RecipeError) as raised:
        plan()
    assert message in str(raised.value)


def test_addresses_are_a_list_or_a_text():
    path = ROOT / "recipes/sums/grpo.yaml"
    recipes = [
        load_recipe(path, [f"rounds.sampler={form}"]) for form in ("[http://a:1, http://b:1]", "http://a:1 http://b:1")
    ]
    assert recipes[0] == recipes[1]
