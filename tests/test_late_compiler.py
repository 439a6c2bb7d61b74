"""Functions that libraries compile when they are imported are compiled when they are called.

python -m pytest -q tests/test_late_compiler.py
"""

import subprocess
import sys

import pytest
import torch

from cookbook.system.late_compiler import compiled_when_called

ASKED = """
import sys
from cookbook.system.late_compiler import compiled_when_called
with compiled_when_called():
    import peft
    from bitsandbytes.backends.default import ops
print("torch._inductor.compile_fx" in sys.modules)
"""


def test_a_function_is_compiled_by_its_first_call_with_its_options(monkeypatch: pytest.MonkeyPatch):
    compiled = []

    def compile_now(function, **options):
        compiled.append(options)
        return lambda *given, **named: ("compiled", function(*given, **named))

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiled_when_called():

        @torch.compile
        def bare(a: int, b: int = 2) -> int:
            """Adds."""
            return a + b

        @torch.compile(dynamic=True)
        def with_options(a: int) -> int:
            return -a

    assert torch.compile is compile_now and compiled == [] and bare.__doc__ == "Adds."
    assert [bare(1), bare(1, b=3), with_options(4)] == [("compiled", 3), ("compiled", 4), ("compiled", -4)]
    assert compiled == [{}, {"dynamic": True}], "each once"


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [True, False])
def test_peft_imports_no_compiler(is_late: bool):
    code = ASKED if is_late else ASKED.replace("with compiled_when_called():", "if True:")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(not is_late)
