"""Work that libraries, when imported, ask of the compiler or of a list of files is done when needed, or once.

python -m pytest -q tests/test_late_compiler.py
"""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils.import_utils import fetch__all__

from cookbook.system.imports import from_last_all, imports
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


def test_a_function_is_kept_from_the_compiler_by_its_first_call(monkeypatch: pytest.MonkeyPatch):
    disabled = []
    monkeypatch.setattr(torch.compiler, "disable", lambda *given, **options: disabled.append((given, options)) or abs)
    with compiled_when_called():

        @torch.compiler.disable
        def bare(number: int) -> int:
            return number

        assert disabled == [] and bare(-1) == bare(-1) == 1 and len(disabled) == 1
        torch.compiler.disable(bare, recursive=False)
        assert disabled[1:] == [((bare,), {"recursive": False})], "what has options is none of a library's decorators"


MODELS = """
import hashlib, sys
from cookbook.system.imports import import_models
read = []
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "fetch__all__":
        read.append(len(frame.f_locals["file_content"]))
sys.setprofile(note)
ASKED
import transformers.models
sys.setprofile(None)
assert transformers.AutoConfig.for_model("llama").model_type == "llama"
listed = sys.modules["transformers.models"]._class_to_module
names = sorted(map(repr, [*listed.items(), *transformers._class_to_module.items()]))
print(len(read), sum(read), len(names), hashlib.sha256(repr([transformers.__version__, names]).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_list_of_models_is_made_once_and_is_the_same():
    answers = (
        subprocess.run([sys.executable, "-c", MODELS.replace("ASKED", asked)], capture_output=True, text=True)
        for asked in ("import_models()", "import transformers; import_models()", "")
    )
    ours, late, own = (answer.stdout.split() for answer in answers)
    assert ours[2:] == late[2:] == own[2:] and int(own[2]) > 2000
    files, letters = int(own[0]), int(own[1])
    assert 2 * int(ours[0]) == 2 * int(late[0]) == files > 2000
    assert 20 * int(ours[1]) < letters and 1.5 * int(late[1]) < letters, "transformers had looked at each line"


def test_names_that_a_file_exports_are_those_from_its_last_list_on():
    """Every twentieth file of transformers' models is compared with transformers' own reading of the whole file."""
    files = sorted((Path(transformers.__file__).parent / "models").glob("*/*.py"))[::20]
    texts = ["", "__all__ = ['a']", "x\n__all__ = [\n'b',\n]\n__all__ = ['c']\n", "a = b.__all__", "\n  __all__ = 1"]
    texts += [path.read_text(encoding="utf-8") for path in files]
    read = [(fetch__all__(text), fetch__all__(from_last_all(text))) for text in texts]
    assert all(whole == last for whole, last in read) and [whole for whole, _ in read[:3]] == [[], ["a"], ["c"]]
    assert sum(len(from_last_all(text)) for text in texts) < 0.2 * sum(map(len, texts)), "else it spares nothing"


def test_a_frame_has_its_line_without_a_text_while_libraries_are_imported():
    frame = inspect.currentframe()
    before = inspect.getframeinfo(frame)
    with imports():
        within = inspect.getframeinfo(frame)
    after = inspect.getframeinfo(frame)
    assert within.filename == before.filename == __file__ and within.lineno == before.lineno + 2
    assert within.code_context is None and before.code_context and after.code_context


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [True, False])
def test_peft_imports_no_compiler(is_late: bool):
    code = ASKED if is_late else ASKED.replace("with compiled_when_called():", "if True:")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(not is_late)


VALIDATORS = """
import sys
from cookbook.system.imports import import_models, import_validators
import_models()
ASKED
from transformers import AutoConfig
AutoConfig.for_model("llama")
print(sorted({"accelerate", "torch.distributed.tensor", "transformers.activations"} & {*sys.modules}))
from transformers.utils.type_validators import activation_fn_key
field = activation_fn_key(default="silu").metadata
for name in ("silu", "unheard"):
    try:
        print(field["validator"][0](name))
    except ValueError as error:
        print(error)
print(sys.modules["transformers.activations"].ACT2FN["silu"])
"""


@pytest.mark.slow
def test_a_configuration_brings_no_activation_functions_until_a_name_is_compared_with_theirs():
    late, own = (
        subprocess.run([sys.executable, "-c", VALIDATORS.replace("ASKED", asked)], capture_output=True, text=True)
        for asked in ("import_validators()", "")
    )
    assert late.stdout.splitlines()[0] == "[]" and "'transformers.activations'" in own.stdout.splitlines()[0]
    assert late.stdout.splitlines()[1:] == own.stdout.splitlines()[1:] and "unheard" in own.stdout, own.stderr
