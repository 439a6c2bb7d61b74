"""Code that rests on a library's insides is listed with its guard. python -m pytest -q tests/test_upgrade.py"""

import ast
import itertools
import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from benchmarks import library_code, upgrade_places
from benchmarks.tiny_models import tiny_config, tiny_model
from cookbook.config.sections import ModelSection
from cookbook.system import replaced
from cookbook.system.files import RecipeError
from cookbook.training.engine.as_read import each_weight
from cookbook.training.models.language_model import load_model


@pytest.mark.core
def test_the_page_is_what_the_code_says():
    written = upgrade_places.PAGE.read_text(encoding="utf-8")
    assert written == upgrade_places.page(), "run: python benchmarks/upgrade_places.py"
    table = upgrade_places.places()
    assert len(table) > 100 and {place.kind for place in table} <= upgrade_places.WORDS.keys()
    assert [place for place in table if place.guard == "none"] == []


def test_each_kind_of_place_is_found():
    code = """
import torch
from torch._dynamo import counters
from peft import Layer
def own(model, _known):
    model._theirs; model._ours; _known._theirs_too = 1
    torch.compile = None
    getattr(model, "_asked", None)
    getattr(model.config, "asked_too", None); getattr(model, "not_asked", None)
    replace_functions(Layer, _size=own)
    set_values(torch.backends, limit=1)
    model.register_forward_hook(own)
    type(model).__name__ == "Theirs"
    "Part" in type(model).__name__.lower()
    inspect.signature(model)
class Own(Layer):
    def _called_by_theirs(self): super()._called_by_theirs()
    def _called_by_ours(self): self._called_by_ours()
"""
    nodes, own = list(ast.walk(ast.parse(code))), {"_ours", "_called_by_theirs", "_called_by_ours"}
    places = upgrade_places._of_file(nodes, own, set(upgrade_places._called(nodes)))
    kinds = {(kind, name) for kind, name, *_ in places}
    assert kinds == {
        ("private import", "torch._dynamo.counters"),
        ("private name", "_theirs"),
        ("private name, set", "_theirs_too"),
        ("replaced in silence", "torch.compile"),
        ("replaced in silence", "torch.backends.limit"),
        ("private name, asked for", "_asked"),
        ("name in a configuration", "asked_too"),
        ("replaced function", "Layer._size"),
        ("method overridden", "Own._called_by_theirs"),
        ("hook", "model.register_forward_hook"),
        ("name of a class", "Theirs"),
        ("name of a class", "Part"),
        ("signature", "model"),
    }


@pytest.mark.parametrize("place", sorted(replaced.KNOWN))
def test_a_function_that_is_replaced_is_as_it_was_read(place: str):
    owner, name = upgrade_places._resolve(place)
    assert owner is not None and replaced.place_of(owner, name) == place
    version = metadata.version(place.partition(".")[0]).partition("+")[0]
    if hasattr(owner, name) or version in itertools.chain(*replaced.KNOWN[place].values()):
        replaced.check_function(owner, name)


def changed(places: dict[str, dict[str, list[str]]]) -> list[str]:
    """Places whose code is not what was read in the installed version, or, if none was, in any."""
    names = []
    for place, digests in places.items():
        read = [digest for digest, versions in digests.items() if version_of(place) in versions] or digests
        if library_code.digest(place) not in read:
            names.append(place)
    return names


def version_of(place: str) -> str:
    return metadata.version(re.split(r"[.:]", place)[0]).partition("+")[0]


def unread() -> dict[str, dict[str, list[str]]]:
    """Places of libraries in a version that the table does not have."""
    table = upgrade_places.CODE
    return {
        place: digests
        for place, digests in table.items()
        if version_of(place) not in itertools.chain(*digests.values())
    }


@pytest.mark.core
def test_the_code_around_a_private_name_is_as_it_was_read(monkeypatch: pytest.MonkeyPatch):
    """No error tells that a name has another meaning: the sums of FSDP2 kept theirs in torch 2.15, and were rounded.
    What the table has of the installed version was read from it, which the slow test compares."""
    assert changed(unread()) == [], "read what the release changed there (docs/upgrade.md)"
    monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == "datasets" else "100.0")
    assert unread() == upgrade_places.CODE
    of_datasets = {place: digests for place, digests in unread().items() if version_of(place) == "99.0"}
    assert len(of_datasets) == 1 and changed(of_datasets) == []
    assert changed({place: {"0" * 16: ["98.0"]} for place in of_datasets}) == list(of_datasets)
    moved = upgrade_places.CODE["torch.distributed.fsdp._fully_shard._fsdp_param_group:_partial_reduce_output"]
    assert all(not {"2.13.0", "2.15.0"} <= set(versions) for versions in moved.values())


@pytest.mark.slow
def test_the_table_has_the_code_of_the_installed_libraries():
    assert changed(upgrade_places.CODE) == []


@pytest.mark.core
def test_each_private_name_and_each_code_that_a_comment_cites_is_in_the_table():
    needed, citations = {place.code for place in upgrade_places.places() if place.code}, upgrade_places.cited_code()
    whole = {code for code in needed if not code.startswith(":")}
    names = {code for code in needed if code.startswith(":")}
    table = set(upgrade_places.CODE)
    assert len(whole) > 40 and len(names) > 40
    of_comments = {place for place in table for cited in citations if upgrade_places.is_of(place, *cited)}
    assert len(citations) > 100
    assert [cited for cited in citations if not any(upgrade_places.is_of(place, *cited) for place in of_comments)] == []
    assert whole <= table
    of_objects = {place for place in table if f":{place.rpartition(':')[2]}" in names}
    assert {f":{place.rpartition(':')[2]}" for place in of_objects} == names
    assert table == whole | of_objects | of_comments, "python benchmarks/upgrade_places.py --digests"


COMPARED_ELSEWHERE = re.compile(r"\w\.(cpp|cu|h)\b|#\d|docs/upstream|tests/|or newer")
"""C++, which no wheel brings; an issue of the library; a test."""
MEASURED = re.compile(r"\b(counted|took|at most)\b")
EVIDENCE = re.compile(r"(the sources? of )?{0}(( and|,) {0})*('s source)?".format(r"\w+ [\d.]+"))
"""The column of a combination that is refused."""


def without_a_source(comment: str) -> bool:
    """True if a comment names a version and nothing by which what it says can be looked up again."""
    text = comment.strip("\"'")
    has_source = upgrade_places.CITED_CODE.search(text) or COMPARED_ELSEWHERE.search(text) or MEASURED.search(text)
    return bool(upgrade_places.CITED.search(text)) and not has_source and not EVIDENCE.fullmatch(text)


@pytest.mark.core
def test_a_comment_that_names_a_version_says_where_to_look():
    comments = [(file, comment) for file, text in upgrade_places.files() for comment in upgrade_places._comments(text)]
    assert sum(bool(upgrade_places.CITED.search(comment)) for _, comment in comments) > 80
    assert [(file, comment) for file, comment in comments if without_a_source(comment)] == []
    assert without_a_source("What torch 2.13 leaves in float32.")
    assert not without_a_source("As torch 2.13 does (nn/utils/clip_grad.py, `_get_total_norm`).")


def test_a_digest_is_that_of_the_code_around_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = """
class Layer:
    def __init__(self):
        self._size, self.__hidden = 1, 2

    def size(self):
        return 2 * self._size

    def other(self):
        return 3
"""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(library: str, text: str, name: str) -> str:
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").touch()
        (tmp_path / library / "layers.py").write_text(text)
        return library_code.digest(f"{library}.layers:{name}")

    documented = code.replace("def size(self):", 'def size(self):\n        """Its size."""')
    sizes = {
        "first": digest("first", documented, "_size"),
        "another function": digest("second", documented.replace("return 3", "return 4"), "_size"),
        "a comment": digest("third", documented.replace("self._size\n", "self._size  # as long\n"), "_size"),
        "a docstring": digest("fourth", documented.replace("Its size", "Twice its size"), "_size"),
    }
    assert len(set(sizes.values())) == 1, sizes
    assert digest("fifth", documented.replace("2 * self", "3 * self"), "_size") != sizes["first"]
    assert digest("sixth", documented.replace("return 3", 'return getattr(self, "_size")'), "_size") != sizes["first"]
    assert list(library_code.definitions({"_size", "_none"}, ("first", "library_of_nobody"))) == ["first.layers:_size"]
    # the name that Python gives to what begins with two underscores
    hidden = digest("seventh", code, "_Layer__hidden")
    assert "absent" != hidden != digest("eighth", code.replace("= 1, 2", "= 1, 3"), "_Layer__hidden")
    assert library_code.cited("second/layers.py", "Layer.size", ("first", "second")) == ["second.layers.Layer.size"]
    assert library_code.digest("first.layers.Layer.other") != library_code.digest("second.layers.Layer.other")
    assert library_code.digest("first.layers.Layer.size") == library_code.digest("second.layers.Layer.size") != "absent"
    assert library_code.digest("first.layers.Layer.none") == "absent"
    assert digest("ninth", code, "Layer") != digest("tenth", code.replace("return 3", "return 4"), "Layer")
    assert digest("eleventh", code, "_gone") == library_code.digest("library_of_nobody.layers:_size") == "absent"
    view, copy = map(library_code.digest, ("torch.ops.aten:_unsafe_view", "torch.ops.aten:_to_copy"))
    assert "absent" != view != copy != "absent"


@pytest.mark.core
def test_each_function_that_the_code_replaces_is_in_the_table():
    """Functions of ZeRO's optimizers go by the class of the object."""
    names = {place.name.rpartition(".")[2] for place in upgrade_places.places() if place.kind == "replaced function"}
    known = {place.rpartition(".")[2] for place in replaced.KNOWN}
    assert names - {"name"} <= known and known - names == {"_get_norm_groups", "_update_scale", "scaled_global_norm"}


class Library:
    """Stands in for one of a library."""

    def size(self, factor: int) -> int:
        """Its docstring."""
        return 2 * factor  # its comment


def known(monkeypatch: pytest.MonkeyPatch, digest: str) -> str:
    place = replaced.place_of(Library, "size")
    monkeypatch.setattr(replaced, "KNOWN", {place: {digest: ["1.0"]}})
    monkeypatch.setattr(replaced, "metadata", SimpleNamespace(version=lambda name: "2.0"))
    return place


def test_a_function_is_replaced_while_it_is_open(monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, replaced.digest_of(Library, "size"))
    with replaced.replace_functions(Library, size=lambda self, factor: 3 * factor):
        assert Library().size(2) == 6
        with replaced.replace_functions(Library, size=lambda self, factor: 5 * factor):
            assert Library().size(2) == 10
        assert Library().size(2) == 6
    assert Library().size(2) == 4


def test_a_function_that_changed_or_is_gone_is_not_replaced(monkeypatch: pytest.MonkeyPatch):
    place = known(monkeypatch, "0" * 16)
    way_out = r"it was read in 1.0: install one of these \(docs/upgrade.md\)"
    with pytest.raises(
        RecipeError, match=rf"{place} of {place.partition('.')[0]} 2.0 is not as it was read; {way_out}"
    ):
        replaced.replace_function(Library, "size", None)
    monkeypatch.delattr(Library, "size")
    with pytest.raises(RecipeError, match=r"is not in \w+ 2.0, and a run replaces it; it was read in 1.0"):
        replaced.replace_function(Library, "size", None)


def test_comments_and_docstrings_are_no_change_and_a_factor_is():
    class Same:
        def size(self, factor: int) -> int:
            return 2 * factor

    class Other:
        def size(self, factor: int) -> int:
            return 4 * factor

    digests = [replaced.digest_of(owner, "size") for owner in (Library, Same, Other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_hook_that_the_first_step_does_not_call_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    """One of two on one place is enough, as where a parameter has no part in a loss."""
    monkeypatch.setattr(replaced, "_calls", {})
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    called = []
    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(replaced.count_calls(called.append, "parameters"))
    with pytest.raises(RecipeError, match=r"the first step called no hook on parameters; see docs/upgrade.md"):
        replaced.check_hooks()
    first.sum().backward()
    replaced.check_hooks()
    assert called == [first]
    replaced.count_calls(called.append, "buckets")
    with pytest.raises(RecipeError, match=r"no hook on buckets"):
        replaced.check_hooks()
    replaced.forget_hooks()
    replaced.check_hooks()


def test_a_tied_pair_that_is_none_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    tiny_model(config).save_pretrained(tmp_path)
    load_model(str(tmp_path), ModelSection(name_or_path="x"), packing=False)
    monkeypatch.setattr(LlamaForCausalLM, "_tied_weights_keys", {})
    with pytest.raises(RecipeError, match=r"tie_word_embeddings is true, and embedding and head are two weights"):
        load_model(str(tmp_path), ModelSection(name_or_path="x"), packing=False)


def test_experts_in_a_class_of_another_name_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    load_model(str(tmp_path), ModelSection(name_or_path="x"), packing=False)
    renamed = type("Qwen3MoeStack", (modeling_qwen3_moe.Qwen3MoeExperts,), {})
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", renamed)
    with pytest.raises(RecipeError, match=r"qwen3_moe under .*: gate_up_proj of Qwen3MoeStack stacks 4 experts, which"):
        load_model(str(tmp_path), ModelSection(name_or_path="x"), packing=False)


def test_a_model_that_is_read_past_the_hook_ends_the_start():
    with pytest.raises(RecipeError, match=r"no weight of the model passed by"), each_weight(lambda *arguments: None):
        pass
    with pytest.raises(RecipeError, match=r"passed by"), each_weight(lambda *arguments: None):
        torch.nn.Linear(1, 1)  # which is made, and not read


def test_a_model_that_is_made_while_another_is_read_keeps_its_weights():
    """As the small one that packing is tried on, under ZeRO-3 and FSDP2 with weights in 4 bits."""
    read = torch.nn.Linear(1, 1, bias=False, device="meta")
    with each_weight(lambda module, name, weight: torch.nn.Parameter(0 * weight.detach())):
        made = torch.nn.Linear(1, 1)
        for layer in (made, read):
            layer.weight = torch.nn.Parameter(torch.ones(1, 1))
    assert (made.weight.item(), read.weight.item()) == (1, 0)


def test_the_table_is_written_as_it_is_read():
    text = replaced.TABLE.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
