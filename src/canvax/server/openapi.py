"""The OpenAPI description, made from what APIs declare and the records that check what is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from canvax._version import __version__
from canvax.call import OptionRecord
from canvax.models.denoiser import MOST_REFERENCES
from canvax.server.paths import ApiPath, Operation
from canvax.settings import json_schema

_ERRORS = {
    "400": "An argument cannot be used.",
    "401": "No API key, or a wrong one.",
    "403": "A page of another site.",
    "404": "No such model, job or image.",
    "408": "The body did not come.",
    "409": "The job was cancelled.",
    "413": "The body is too large.",
    "415": "A kind of body that is not read.",
    "421": "Another host's name.",
    "422": "A field is wrong.",
    "429": "The queue is full, or too many requests: see Retry-After.",
    "500": "The server failed.",
    "503": "The server starts, stops or is out of memory: see Retry-After.",
    "504": "The images were not done in time.",
}
_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
_FILES = {
    "type": "object",
    "properties": {
        "image": _FILE | {"description": "the only image"},
        "image[]": {"type": "array", "items": _FILE, "maxItems": MOST_REFERENCES},
        "mask": _FILE | {"description": "transparent where the image changes, of its size"},
    },
    "anyOf": [{"required": ["image"]}, {"required": ["image[]"]}],
}
"""File fields of a form."""
_NUMBERS = ("index",)


def description(paths: Iterable[ApiPath]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of paths: of their operations that have a summary."""
    every = [
        (path.path.replace(":path}", "}"), method.lower(), operation)
        for path in paths
        for method, operation in path.operations.items()
        if operation.summary and not path.alias
    ]
    records = [operation.body for _, _, operation in every if operation.body not in (None, bytes)]
    schemas, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    for component in components.values():
        if "options" in component.get("properties", {}):  # a plain table for msgspec: canvax.Options checks it
            component["properties"]["options"] = {"anyOf": [{"$ref": "#/components/schemas/Options"}, {"type": "null"}]}
    components["Options"] = json_schema(OptionRecord, "server")
    described, of_records = dict[str, Any](), iter(schemas)
    for path, method, operation in every:
        described.setdefault(path, {})[method] = entry = _operation(operation, path)
        if operation.body is bytes:
            entry["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
        elif operation.body is not None:
            kind = "multipart/form-data" if operation.form else "application/json"
            schema = {"allOf": [next(of_records), _FILES]} if operation.form else next(of_records)
            entry["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "canvax", "version": __version__},
        "paths": described,
        "components": {"schemas": components, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation, path: str) -> dict[str, Any]:
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    answers = {str(operation.status): {"description": "Done."}}
    answers |= {code: {"description": text} for code, text in _ERRORS.items()}
    return {"summary": operation.summary, "parameters": list(_parameters(named)), "responses": answers}


def _parameters(names: Iterable[str]) -> Iterable[dict[str, Any]]:
    for name in names:
        kind = {"type": "integer", "minimum": 0} if name in _NUMBERS else {"type": "string"}
        yield {"name": name, "in": "path", "required": True, "schema": kind}
