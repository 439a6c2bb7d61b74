# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulation of GPUs itself: its counts and refusals, compared with values by hand.

python -m pytest -q simulated_gpus/tests
"""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simulated_gpus
from simulated_gpus import SimulationError

PACKAGE = Path(simulated_gpus.__file__).parent


def need_simulated_gpus() -> None:
    """Skips the test where GPUs cannot be simulated; with SKIP_NOTHING set it fails."""
    if why := simulated_gpus.problem():
        (pytest.fail if os.environ.get("SKIP_NOTHING") else pytest.skip)(f"needs simulated GPUs: {why}")


def run(*command: str, memory: int = 1 << 20, folder: Path | None = None, **extra: str) -> subprocess.CompletedProcess:
    """A program with two simulated GPUs, of 1 MiB unless given, in an environment without a launcher's variables."""
    need_simulated_gpus()
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONPATH": ""} | simulated_gpus.environment(2, memory=memory) | extra
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def evaluate(code: str, **extra: str) -> list:
    """The values that a program passes to `tell(...)`, on the simulated GPUs."""
    program = f"import json, os, sys, torch\ntold = []\ntell = told.append\n{code}\nprint('TOLD' + json.dumps(told))"
    # One in hundreds aborts in the interpreter's end, which right after a backward still meets autograd's threads.
    program += "\nsys.stdout.flush()\nos._exit(0)"
    done = run(sys.executable, "-c", program, **extra)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("TOLD")[1])


def test_memory_is_counted_in_blocks_of_512_bytes_and_has_an_end():
    code = """
from torch import cuda
a = torch.zeros(129, device="cuda")                        # 516 bytes: two blocks
tell(cuda.memory_allocated())
b = a[:3]                                                  # a view: nothing
c = a.half() + 1                                           # 258 bytes twice, of which one stays
tell(cuda.memory_allocated())
tell(cuda.max_memory_allocated())
a.untyped_storage().resize_(0)
tell(cuda.memory_allocated())
d = torch.ones(8, device="cuda:1")
tell(cuda.memory_allocated(1))
try:
    torch.empty(1 << 20, device="cuda")
except torch.OutOfMemoryError as error:
    tell(str(error)[:18])
tell(cuda.memory_allocated())
del c
tell(cuda.memory_allocated())
"""
    assert evaluate(code) == [1024, 1536, 2048, 512, 512, "CUDA out of memory", 512, 0]


def test_copying_many_tensors_at_once_gives_every_nan_of_16_bits_the_same_bits():
    """So FSDP2 broke 4-bit weights that lie in bf16 (bitsandbytes issue 1945); `copy_` moves the bytes."""
    code = """
words = torch.tensor([0x7F81, -0x0001, 0x7F80, 0x3F80, -0x0080], dtype=torch.int16, device="cuda")
for copy in (lambda to, of: torch._foreach_copy_([to], [of]), lambda to, of: to.copy_(of)):
    for dtype in (torch.bfloat16, torch.int16):
        to = torch.zeros(5, dtype=dtype, device="cuda")
        copy(to, words.view(dtype))
        tell([value & 0xFFFF for value in to.view(torch.int16).tolist()])
"""
    same = [0x7F81, 0xFFFF, 0x7F80, 0x3F80, 0xFF80]
    assert evaluate(code) == [[0x7FFF, 0x7FFF, *same[2:]], same, same, same]


def test_factors_of_16_bits_are_summed_in_float32_and_rounded_once():
    code = """
for dtype in (torch.bfloat16, torch.float16):
    a, b, c = (torch.randn(2, 33, 33, device="cuda").to(dtype) for _ in range(3))
    exact = a.float() @ b.float()
    out = torch.empty(33, 33, dtype=dtype, device="cuda")
    torch.mm(a[0], b[0].t(), out=out)
    pairs = [(a @ b, exact), (a[0] @ b[0], exact[0]), (out, a[0].float() @ b[0].t().float())]
    pairs += [(torch.addmm(c[0], a[0], b[0]), c[0].float() + exact[0]), (torch.baddbmm(c, a, b), c.float() + exact)]
    for found, expected in pairs:
        tell([str(found.device), found.dtype == dtype, bool((found == expected.to(dtype)).all())])
"""
    assert evaluate(code) == [["cuda:0", True, True]] * 10


def test_integers_are_counted_as_cuda_counts_them():
    code = """
found = torch.histc(torch.tensor([0, 2, 2, 5], dtype=torch.int32, device="cuda"), bins=3, min=0, max=2)
tell(found.tolist())
tell(str(found.dtype))
"""
    assert evaluate(code) == [[1, 0, 2], "torch.int32"]


def test_a_softmax_of_fp16_is_float32_and_its_gradient_fp16():
    """One kernel does both, as eager attention asks for it. The gradient of a softmax, by hand: p (g - sum of p g)."""
    code = """
scores = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float16, device="cuda", requires_grad=True)
for function in (torch.softmax, torch.log_softmax):
    result = function(scores, -1, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(result[0, 0], scores)
    tell([str(result.dtype), result.tolist()[0], str(gradient.dtype), gradient.tolist()[0]])
"""
    exps = [math.exp(x) for x in (1.0, 2.0, 4.0)]
    p = [value / sum(exps) for value in exps]
    soft, logs = evaluate(code)
    assert (soft[0], soft[2], logs[0], logs[2]) == ("torch.float32", "torch.float16") * 2
    assert soft[1] == pytest.approx(p, rel=1e-6)
    assert logs[1] == pytest.approx([math.log(probability) for probability in p], rel=1e-6)
    assert soft[3] == pytest.approx([p[0] * ((i == 0) - p[i]) for i in range(3)], rel=1e-3, abs=1e-4)
    assert logs[3] == pytest.approx([(i == 0) - p[i] for i in range(3)], rel=1e-3)


def test_a_tensor_is_copied_with_its_storage():
    code = """
import copy
tensor = torch.arange(6, device="cuda")[2:]
found = copy.deepcopy(tensor)
found += 1
tell([found.tolist(), tensor.tolist(), found.device.type])
"""
    assert evaluate(code) == [[[3, 4, 5, 6], [2, 3, 4, 5], "cuda"]]


def test_what_cuda_refuses_is_refused():
    code = """
def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)[:60]
cuda = torch.ones(4, 4, device="cuda")
tell(refusal(lambda: cuda + torch.ones(4, 4)))
tell(refusal(lambda: cuda + torch.ones(4, 4, device="cuda:1")))
tell(refusal(lambda: cuda + torch.tensor(1.0)))
tell(refusal(lambda: cuda.long() @ cuda.long()))
tell(refusal(lambda: torch.ones(1, device="cuda:2")))
tell(refusal(lambda: cuda.numpy() if False else torch.cuda.set_device(2)))
step = [torch.zeros((), device="cuda")]
tell(refusal(lambda: torch._fused_adamw_([cuda], [cuda], [cuda], [cuda], [], [torch.zeros(())], lr=1.0, beta1=0.9,
     beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)))
"""
    host, other, scalar, integers, missing, beyond, fused = evaluate(code)
    assert host.startswith("Expected all tensors to be on the same device") and other.startswith(host[:40])
    assert scalar is None, "a number of the host is no tensor of the host"
    assert "not implemented" in integers
    assert "invalid device ordinal" in missing and "invalid device ordinal" in beyond
    assert "a tensor of the host" in fused


def test_waits_are_counted_where_the_host_would_wait_and_nowhere_else():
    code = """
import simulated_cuda
def waits(call):
    before = sum(simulated_cuda._waits.values())
    call()
    return sum(simulated_cuda._waits.values()) - before
x = torch.ones(4, device="cuda")
pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
index = torch.tensor([1, 2], device="cuda")
for call in (
    lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.cpu(), lambda: pageable.to("cuda"),
    lambda: torch.cuda.synchronize(), lambda: bool(x.any()), lambda: pinned.to("cuda"),
    lambda: x + 1, lambda: x[index], lambda: x.index_select(0, index), lambda: pinned.to("cuda", non_blocking=True),
    lambda: torch.where(x > 0, x, 0), lambda: x.to("cuda:1"), lambda: x.record_stream(torch.cuda.current_stream()),
):
    tell(waits(call))
"""
    assert evaluate(code) == [1] * 8 + [0] * 7


def test_a_stream_that_does_not_wait_for_another_is_found_and_one_that_does_is_not():
    code = """
import simulated_cuda
from torch.cuda import current_stream, stream, synchronize
x, main, side = torch.ones(4, device="cuda"), current_stream(), torch.cuda.Stream()
def races(call, *arguments):
    before = sum(simulated_cuda._races.values())
    call(*arguments)
    return sum(simulated_cuda._races.values()) - before
def on_side(call):
    with stream(side):
        side.wait_stream(main)
        return call()
def read(wait):
    y = on_side(lambda: x * 2)
    wait()
    return y + 1
def overwrite(wait):
    on_side(lambda: x + 1)
    wait()
    x.add_(1)
def free(keep):
    y = torch.ones(4, device="cuda")
    z = on_side(lambda: y * 2)
    if keep:
        y.record_stream(side)
    del y
    w = torch.ones(4, device="cuda")    # where y was, perhaps
    main.wait_stream(side)
def nothing(): pass
def event(): main.wait_event(side.record_event())
def asked(): return side.record_event().query()
ways = (nothing, lambda: main.wait_stream(side), event, side.synchronize, synchronize, asked)
for call in (read, overwrite):
    tell([races(call, wait) for wait in ways])
synchronize()
tell([races(free, keep) for keep in (False, True)])
tell(sorted({why for why, *_ in simulated_cuda._races}))
"""
    read, overwritten, freed, reasons = evaluate(code)
    assert read == overwritten == [1, 0, 0, 0, 0, 0] and freed == [1, 0]
    assert reasons == [
        "aten::add.out reads what aten::mul.out wrote on another stream, without waiting for it",
        "aten::add.out writes what aten::add.out read on another stream, without waiting for it",
        "aten::fill_.Scalar uses memory that was freed while aten::mul.out on another stream used it",
    ]


def test_a_host_that_does_not_wait_for_a_copy_is_found_and_one_that_does_is_not():
    """Early reads see NaN. Both directions, with every way to wait, and copies that CUDA waits for itself."""
    code = """
import simulated_cuda
from torch.cuda import current_stream, stream, synchronize, Event
x, main, side = torch.arange(4.0, device="cuda"), current_stream(), torch.cuda.Stream()
def pinned(): return torch.ones(4, pin_memory=True)
def races(call, *arguments):
    before = dict(simulated_cuda._races)
    call(*arguments)
    synchronize()
    found = {key[0].partition(", begun at ")[0] for key, n in simulated_cuda._races.items() if n != before.get(key)}
    return sorted(found)
def recorded():
    event = Event()
    event.record()
    return event
ways = (
    lambda: None, side.synchronize, main.synchronize, synchronize, lambda: recorded().synchronize(),
    lambda: recorded().query(), lambda: x.sum().item(), lambda: x.cpu(), lambda: torch.ones(4).to("cuda"),
)
def read(wait):
    copy = pinned().copy_(x, non_blocking=True)
    wait()
    copy + 1
def overwrite(wait):
    source = pinned()
    source.to("cuda", non_blocking=True)
    wait()
    source.add_(1)
def unseen(wait):
    source = pinned()
    numbers = source.numpy()
    source.to("cuda", non_blocking=True)
    wait()
    numbers[1] = 5
for call in (read, overwrite, unseen):
    tell([len(races(call, wait)) for wait in ways])
    tell(races(call, ways[0]))
def event_before():
    event = recorded()
    copy = x.to("cpu", non_blocking=True)
    event.synchronize()
    tell(str(copy.tolist()))
def value():
    tell(str(x[1].to("cpu", non_blocking=True).item()))
def in_a_kernel():
    tell(str((x * x[1].to("cpu", non_blocking=True)).tolist()))
def unseen_before_it_arrives():
    copy = pinned()
    numbers = copy.numpy()
    copy.copy_(x, non_blocking=True)
    tell(str(numbers.tolist()))
    numbers[1] = 5
def other_type():
    pinned().double().pin_memory().copy_(x, non_blocking=True) + 1
def back_on_another_stream():
    copy = x.to("cpu", non_blocking=True)
    with stream(side):
        copy.to("cuda", non_blocking=True)
for call in (event_before, value, in_a_kernel, unseen_before_it_arrives, other_type, back_on_another_stream):
    tell(races(call))
def pageable(): (torch.empty(4).copy_(x, non_blocking=True) + 1).tolist()
def blocking(): (pinned().copy_(x) + 1).tolist()
def strided(): (torch.ones(4, 2, pin_memory=True)[:, 0].copy_(x, non_blocking=True) + 1).tolist()
def freed():
    pinned().to("cuda", non_blocking=True)
    pinned().fill_(5)
def beside():
    both = torch.ones(8, pin_memory=True)
    both[:4].copy_(x, non_blocking=True)
    both[4:].add_(1)
def view():
    copy = x.to("cpu", non_blocking=True)
    copy.view(2, 2)[1].is_pinned()
def back():
    copy = x.to("cpu", non_blocking=True)
    tell(copy.to("cuda", non_blocking=True).tolist())
    tell(copy.tolist())
def twice():
    copy = x.to("cpu", non_blocking=True)
    copy[1:].copy_(x[1:] + 1, non_blocking=True)
    main.synchronize()
    tell(copy.tolist())
for call in (pageable, blocking, strided, freed, beside, view, back, twice):
    tell(races(call))
tell(sorted(why for why, *_ in simulated_cuda._races if "_local_scalar_dense" in why))
"""
    answers = iter(evaluate(code))
    reading, writing = (f"pinned memory that a copy may still be {doing}" for doing in ("reading", "writing"))
    counts, nan = [1, 1, 0, 0, 0, 0, 0, 0, 0], str([float("nan")] * 4)
    assert next(answers) == counts and next(answers) == [f"aten::add.Tensor reads {writing}"]
    assert next(answers) == counts and next(answers) == [f"aten::add_.Tensor writes {reading}"]
    assert next(answers) == counts and next(answers) == [f"the host writes {reading}"]
    assert next(answers) == nan and next(answers) == [f"aten::resolve_conj reads {writing}"]
    assert next(answers) == "nan" and next(answers) == [f"aten::_local_scalar_dense reads {writing}"]
    assert next(answers) == nan and next(answers) == [f"aten::mul.out reads {writing}"]
    assert next(answers) == nan and next(answers) == [f"the host writes {writing}"]
    assert next(answers) == [f"aten::add.Tensor reads {writing}"]
    assert next(answers) == ["aten::copy_ reads what aten::copy_ wrote on another stream, without waiting for it"]
    assert [next(answers) for _ in range(6)] == [[]] * 6
    assert next(answers) == next(answers) == [0, 1, 2, 3] and next(answers) == []
    assert next(answers) == [0, 2, 3, 4] and next(answers) == []
    assert "begun at <string>:" in next(answers)[0] and not list(answers)


def test_attention_takes_the_kernel_that_cuda_would_and_has_its_numbers():
    code = """
import torch.nn.functional as F, simulated_cuda
library = simulated_cuda.library
def attend(dtype, heads, groups, mask=None, device="cuda"):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 40, 16, dtype=dtype, device="cpu") for h in (heads, groups, groups))
    leaves = [x.to(device).requires_grad_() for x in (query, key, value)]
    mask = None if mask is None else mask.to(device)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != groups)
    out.float().square().sum().backward()
    return [out.detach().float().cpu(), *(x.grad.float().cpu() for x in leaves)]
def kernels():
    return {line.split("\\t")[0] for line in library.simulated_ops().decode().splitlines() if "attention" in line}
mask = torch.ones(40, 40, dtype=torch.bool).tril()
for arguments in ((torch.bfloat16, 4, 2), (torch.float32, 4, 4), (torch.float32, 4, 4, mask), (torch.float32, 4, 2)):
    before = kernels()
    ours, theirs = attend(*arguments), attend(*arguments, device="cpu")
    tell(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs)))
    tell(sorted(name.rpartition(" ")[0] for name in kernels() - before if name.endswith("forward")))
"""
    differences, kernels = (evaluate(code)[i::2] for i in (0, 1))
    assert kernels == [["flash attention"], ["memory-efficient attention"], [], []]
    assert differences[0] < 2e-2 and max(differences[1:]) < 1e-5


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("1", 1), ("0,5,1", 1), ("", 0), ("-1", 0)])
def test_visible_devices_are_read_as_cuda_reads_them(visible: str, count: int):
    assert evaluate("tell(torch.cuda.device_count())", CUDA_VISIBLE_DEVICES=visible) == [count]


def test_launchers_see_as_many_gpus():
    answer = run("nvidia-smi", "--query-gpu=count,name", "--format=csv,noheader").stdout
    assert answer.splitlines()[0] == "2, Simulated GPU"


def test_without_a_compiler_it_says_so(monkeypatch):
    need_simulated_gpus()  # another lack of this machine would be named first
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in str(simulated_gpus.problem())
    with pytest.raises(SimulationError, match="no C\\+\\+ compiler"):
        simulated_gpus.environment(2)


@pytest.mark.parametrize("count", [0, 65, -1])
def test_a_count_that_cannot_be_is_refused(count: int):
    with pytest.raises(SimulationError, match=f"^{count} simulated GPUs; write a number from 1 to 64"):
        simulated_gpus.check(count)


def imported(source: str) -> set[str]:
    """Packages that a program imports, at any time."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_it_imports_the_standard_library_torch_filelock_and_nothing_else():
    """Bitsandbytes and DeepSpeed are patched where a program imports them, by their names."""
    assert imported("import torch.cuda\nfrom cookbook.system import lock") == {"torch", "cookbook"}
    paths = [*PACKAGE.glob("*.py"), *PACKAGE.glob("inject/*.py")]
    assert len(paths) == 4
    packages = set().union(*(imported(path.read_text(encoding="utf-8")) for path in paths))
    assert packages - set(sys.stdlib_module_names) == {"torch", "filelock", "simulated_gpus"}


def test_a_wait_is_charged_to_the_line_of_the_user_s_own_file(tmp_path: Path):
    """Whatever library is below it; and a report is written by the process that used a GPU alone."""
    (tmp_path / "mine.py").write_text("import torch\n\nx = torch.ones(3, device='cuda')\nprint(x.sum().item())\n")
    (tmp_path / "idle.py").write_text("import torch\n\nprint(torch.cuda.device_count())\n")
    report = tmp_path / "report"
    for name, shown in (("idle.py", "2"), ("mine.py", "3.0")):
        done = run(sys.executable, name, folder=tmp_path, SIMULATED_GPUS_REPORT=str(report))
        assert (done.returncode, done.stdout.strip()) == (0, shown), done.stderr[-3000:]
        assert report.is_dir() is (name == "mine.py")
    (wait,) = json.loads((report / "rank_0.json").read_text())["waits"]
    assert (wait["ours"], wait["times"]) == ("mine.py:4", 1)


def test_libraries_are_built_in_the_folder_that_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_simulated_gpus()
    monkeypatch.setenv("SIMULATED_GPUS_CACHE", str(tmp_path))
    (folder,) = simulated_gpus.nvml_environment()["LD_LIBRARY_PATH"].split(os.pathsep)[:1]
    assert Path(folder).parent == tmp_path and (Path(folder) / "libnvidia-ml.so.1").is_file()


def test_the_readme_s_example_runs_as_it_says(tmp_path: Path):
    pytest.importorskip("accelerate")
    blocks = (PACKAGE / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    (program, commands, shown) = (block.partition("\n")[2] for block in blocks)
    (tmp_path / "example.py").write_text(program)
    launch = commands.splitlines()[1].split()
    assert launch[:3] == ["python", "-m", "simulated_gpus"] and "simulated_gpus" not in program
    need_simulated_gpus()
    variables = {"PYTHONPATH": str(PACKAGE.parent), "SIMULATED_GPUS_CACHE": str(simulated_gpus.build().parent)}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, *launch[1:]], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = re.findall(r"cuda:\d: .*?\]\]", done.stdout)  # both processes may write before either ends its line
    assert sorted(written) == shown.splitlines()


@pytest.mark.parametrize("words", [[], ["2"], ["two", "true"], ["65", "true"], ["1", "/no/such/program"]])
def test_a_command_that_cannot_run_ends_with_2(words: list[str]):
    done = subprocess.run([sys.executable, "-m", "simulated_gpus", *words], cwd=PACKAGE.parent, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
