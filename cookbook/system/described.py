"""Models of pydantic whose JSON Schema has the text below each field."""

import ast
import functools
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler


class DescribedModel(BaseModel):
    """Reads the texts when a schema is asked for: pydantic's `use_attribute_docstrings` reads the source of each class
    as it is made, which took a sixth of the time that every command needs to start.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for base in cls.__mro__:
            for name, text in texts_below_fields(base).items() if issubclass(base, DescribedModel) else ():
                if name in properties:
                    properties[name].setdefault("description", text)
        return schema


@functools.cache
def texts_below_fields(model: type) -> dict[str, str]:
    """The string below each annotated name of a class; none of a class that no file has."""
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return {}
    (code,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(code, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, below in itertools.pairwise(code.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts
