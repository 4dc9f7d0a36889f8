"""Writes the reference pages of this folder, and keywords for editors: python docs/reference/generate.py

`make docs` runs it, and tests/test_reference.py fails while a file differs from what it writes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from textwrap import wrap
from typing import Any

import canvax
import canvax.call
from canvax.call import Call, Load, OptionRecord
from canvax.cli.arguments import build_parser
from canvax.familiar import CALL, HARMLESS, LOAD, flax_tables, tables
from canvax.samplers.specs import SAMPLERS
from canvax.server import history
from canvax.server.app import APIS, operations
from canvax.server.jobs import State
from canvax.server.metrics import Metrics
from canvax.server.openapi import description
from canvax.settings import aliases, declared, markdown

FOLDER = Path(__file__).parent
WRITTEN = "<!-- Written by docs/reference/generate.py: change the code, then run it. -->"


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    written = {
        "command-line": command_line(),
        "settings": settings(),
        "samplers": samplers(),
        "http-api": http_api(),
        "metrics": metrics(),
        "names-of-diffusers": names_of_diffusers(),
        "names-of-flax": names_of_flax(),
    }
    return {f"{name}.md": f"{WRITTEN}\n\n{text.strip()}\n" for name, text in written.items()}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def command_line() -> str:
    commands = [
        (name, text, {} if name == "ui" else _groups(parser)) for name, text, parser in _commands(build_parser())
    ]
    shared = _shared({name: groups for name, _, groups in commands})
    parts = [
        "# Command line",
        "All commands and their flags. [The command line](../cli.md) explains the usual ones. Flags of several "
        "commands are listed once, under [shared flags](#shared-flags).",
    ]
    for name, text, groups in commands:
        parts += [f"## canvax {name}", f"{text[:1].upper()}{text[1:]}."]
        if name == "ui":
            parts.append("It takes the flags of [canvax serve](#canvax-serve).")
        rows = [row for group in groups.values() for row in group]
        listed = {row for group in shared.values() for row in group}
        if unshared := [row for row in rows if row not in listed]:
            parts.append(table(("Flag", "Meaning"), unshared))
        if also := [line for title, group in shared.items() if (line := _refers(title, group, rows))]:
            parts.append(f"Shared flags: {'; '.join(also)}.")
    parts.append("## Shared flags")
    for title, group in shared.items():
        name, _, note = title.partition(" (")
        parts += [f"### {name[:1].upper()}{name[1:]}"]
        parts += [f"{note[:1].upper()}{note[1:].rstrip(')')}."] if note else []
        parts.append(table(("Flag", "Meaning"), group))
    return "\n\n".join(parts)


Row = tuple[str, ...]


def _shared(commands: Mapping[str, Mapping[str, list[Row]]]) -> dict[str, list[Row]]:
    """Return the flags of more than one command, by the title of their group in the first of these."""
    having: dict[Row, list[tuple[str, str]]] = {}
    for name, groups in commands.items():
        for title, rows in groups.items():
            for row in rows:
                having.setdefault(row, []).append((name, title))
    shared: dict[str, dict[str, Row]] = {}
    for row, places in sorted(having.items(), key=lambda item: -len(item[1])):
        names = {name for name, _ in places}
        title = next((title for _, title in places if title not in _UNTITLED), "")
        if all(name.startswith("train ") for name in names):
            title = "training a LoRA" if names == {"train lora", "train dreambooth"} else "training"
        if len(places) > 1 and title:
            shared.setdefault(title, {}).setdefault(_name(row), row)
    order = list(having)
    titles = sorted(shared, key=lambda title: min(order.index(row) for row in shared[title].values()))
    return {title: sorted(shared[title].values(), key=order.index) for title in titles if len(shared[title]) > 1}


def _name(row: Row) -> str:
    """Return a flag without its other names and its value."""
    return row[0].partition(",")[0].partition(" ")[0]


_UNTITLED = ("options", "positional arguments")


def _refers(title: str, group: list[Row], rows: list[Row]) -> str:
    """Return a link to a group of shared flags with what a command has of it, or nothing."""
    have = [row for row in group if row in rows]
    lack = [row for row in group if _name(row) not in map(_name, rows)]
    name = title.partition(" (")[0]
    link = f"[{name}](#{name.lower().replace(' ', '-').replace(',', '')})"
    if not have or not lack:
        return link if have else ""
    few = have if len(have) < len(lack) else lack
    return f"{link} {'only' if few is have else 'without'} {', '.join(map(_name, few))}"


def _commands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, help and parser of each command, also of each `canvax train` command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                inner = list(_commands(command, f"{prefix}{name} "))
                yield from inner or [(f"{prefix}{name}", helps[name], command)]


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[Row]]:
    """Return flags and meanings by the title of their group in the help."""
    formatter = parser._get_formatter()
    groups: dict[str, list[Row]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help in (None, argparse.SUPPRESS) or "--help" in action.option_strings:
                continue
            shown = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
            value = formatter._format_args(action, (action.dest or "").upper()) if action.option_strings else ""
            row = f"{shown} {f'`{value}`' if value else ''}".strip(), formatter._expand_help(action)
            groups.setdefault(group.title or "", []).append(row)
    return groups


def settings() -> str:
    rows: list[tuple[str, ...]] = []
    others: dict[str, list[str]] = {name: [] for name in declared(OptionRecord)}
    for alias, name in aliases(OptionRecord).items():
        others[name].append(f"`{alias}`")
    for name, field in declared(OptionRecord).items():
        flags = [f"`{flag}`" for flag in field.setting.flags if flag != f"--{name.replace('_', '-')}"]
        if flags or others[name]:
            rows.append((f"`{name}`", ", ".join(flags), ", ".join(others[name])))
    return "\n\n".join([
        "# Settings",
        "The arguments of `canvax.load`, and the fields of `canvax.Options`.",
        "## Loading a model",
        "[Loading](../loading.md) explains them. Commands have the flags that matter to them: "
        "[command line](command-line.md). In `canvax train`, `--token` and `--text-encoder` mean other things.",
        markdown(Load).strip(),
        "## Options",
        "[The pipeline](../pipeline.md#options) says where they can be given.",
        markdown(OptionRecord).strip(),
        "## Names elsewhere",
        "The flag of `guidance_scale` is `--guidance-scale`, and so on. Other names:",
        table(("Option", "Other flags", "Names of other programs"), rows),
    ])  # fmt: skip


def samplers() -> str:
    rows = []
    for spec in SAMPLERS:
        diffusers = (spec.diffusers_class or "").removesuffix("Scheduler")
        groups = (spec.k_diffusion, *spec.also), (spec.comfyui,), (diffusers,)
        code = [", ".join(f"`{name}`" for name in group if name) for group in groups]
        random = "yes" if spec.stochastic else ""
        rows.append((f"`{spec.name}`", spec.label, *code, spec.order, spec.evaluations, random))
    head = ("canvax", "A1111", "k-diffusion, others", "ComfyUI", "diffusers class (without `Scheduler`)")
    uses = [(spec.label, spec.when) for spec in SAMPLERS]
    return "\n\n".join([
        "# Samplers: names",
        "Any spelling works. [Samplers](../samplers.md#names) explains the columns, "
        "[Which sampler?](../which-sampler.md) compares images. \"(eta 0)\" means without the random part.",
        table((*head, "Order", "Evaluations", "Random"), rows),
        "## When to use each",
        table(("Sampler", "When"), uses),
    ])  # fmt: skip


def http_api() -> str:
    engine: Any = None
    paths = [path for api in APIS for path in api.routes(engine)] + history.routes(Path())
    paths += operations(lambda: State.READY, Metrics())
    document = description(paths)
    schemas = document["components"]["schemas"]
    parts = [
        "# HTTP API",
        "The same as `/openapi.json` of a running server, which leaves out aliases and routes without an effect. "
        "[A server and a page](../serving.md) explains how to use it. `/v1` is for OpenAI's clients, `/sdapi` and "
        "`/controlnet` for A1111's, `/hf` and `/models` for those of Hugging Face. Only `canvax ui` has "
        "`/api/images`. [Errors](../serving.md#errors) have the same codes on all routes. Fields with the name of an "
        "option mean what [the settings](settings.md) say; [jobs](../serving.md#jobs) explains the others, and the "
        "answers. `text (200)` has at most 200 characters.",
    ]
    rows = [
        (f"`{method.upper()} {path}`", operation["summary"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts.append(table(("Request", "Meaning"), rows))
    bodies: dict[str, list[tuple[str, ...]]] = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {})
        for content in body.get("content", {}).values():
            rows = [row for part in _parts(content.get("schema", {}), schemas) for row in _fields(part, schemas)]
            if rows and path not in bodies:
                names = {name for name, *_ in rows}
                bases = (of for of, have in bodies.items() if len(have) > 1 and {name for name, *_ in have} <= names)
                base = next(bases, "")
                more = [row for row in rows if row not in bodies.get(base, [])]
                parts.append(f"## Body of `{path}`")
                parts += [f"As for `{base}`{', with:' if more else '.'}"] if base else []
                parts += [table(("Field", "Value"), more)] if more else []
                bodies[path] = rows
    return "\n\n".join(parts)


def _parts(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in (schema, *schema.get("allOf", ())):
        yield schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = f"; default `{field['default']}`" if field.get("default") else ""
        yield f"`{name}`", _kind(field, schemas) + ("; required" if name in required else default)


def _kind(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The type of a field in words, with its description."""
    if description := field.get("description"):
        return f"{_kind({**field, 'description': ''}, schemas)}: {description}"
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return "[options](settings.md)" if name == "Options" else f"object ({', '.join(schemas[name]['properties'])})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(part, schemas) for part in field["anyOf"] if part.get("type") != "null"))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type", "any")
    if kind == "array":
        if "contentMediaType" in field.get("items", ()):
            return f"up to {field['maxItems']} files"
        return f"list of {_kind(field['items'], schemas)}" if field.get("items") else "list"
    if "contentMediaType" in field:
        return "file"
    if kind == "string":
        return f"text ({field['maxLength']})" if "maxLength" in field else "text"
    least, most = field.get("minimum", field.get("exclusiveMinimum")), field.get("maximum")
    limits = "" if least is None else f"{least:g} or more" if most is None else f"{least:g}..{most:g}"
    without = "without 0" if "exclusiveMinimum" in field else ""
    return ", ".join(filter(None, ("whole number" if kind == "integer" else kind, limits, without)))


def metrics() -> str:
    rows = []
    made: Any = Metrics().registry._names_to_collectors
    for name, collector in made.items():
        if hasattr(collector, "_name") and name == collector._name + ("_total" if collector._type == "counter" else ""):
            labels = ", ".join(f"`{label}`" for label in collector._labelnames)
            rows.append((f"`{name}`", collector._type, labels, collector._documentation))
    return "\n\n".join(["# Metrics", "What `/metrics` of a server gives, in Prometheus' format.",
                         table(("Name", "Kind", "Labels", "Meaning"), rows)])  # fmt: skip


def names_of_diffusers() -> str:
    return (
        "# Names of PyTorch diffusers\n\n"
        "What canvax does with each name. [Coming from PyTorch diffusers](../coming-from-diffusers.md) has the usual "
        f"ones.\n\n{tables().replace('### ', '## ')}"
    )


def names_of_flax() -> str:
    return (
        "# Names of diffusers' Flax pipelines\n\n"
        "What `canvax.flax_api` does with each name. [Coming from diffusers' Flax pipelines]"
        f"(../migrating-from-diffusers-flax.md) has the usual ones.\n\n{flax_tables().replace('### ', '## ')}"
    )


KEYWORDS = FOLDER.parent.parent / "src" / "canvax" / "pipelines" / "keywords.py"

_IMPORTS = '''"""Keywords of calls and of ``canvax.load`` for type checkers and editors, with names of other programs.

Written by docs/reference/generate.py: change the code, then run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from canvax.call import (
    CALL,
)
from canvax.models.text import Conditions
from canvax.params import Params
from canvax.pipelines.options import Options
from canvax.samplers import SamplerSpec, SamplerTable, Solver
from canvax.types import Array, DType
'''

_SPECIAL = {
    "generator": ("Any", "a torch.Generator or a list of them; the same as seed with noise='torch'"),
    "return_dict": ("Literal[True]", "a call always returns a canvax.Result"),
    "timesteps": ("Sequence[float]", "timesteps of the sampler; the same as sampler_settings={'timesteps': ...}"),
    "callback_on_step_end": ("Callable[..., Any]", "called with (pipe, index, timestep, {'latents': array})"),
    "guess_mode": ("bool", "the same as control_mode='guess'"),
    "callback_on_step_end_tensor_inputs": ("Sequence[str]", "['latents']"),
    "prompt_embeds": ("Any", "conditions from the text encoder; the same as prompt=pipe.encode(...)"),
    "pooled_prompt_embeds": ("Any", "the second output of SDXL's text encoders"),
    "negative_prompt_embeds": ("Any", "the same of the negative prompt"),
    "negative_pooled_prompt_embeds": ("Any", "the same of the negative prompt"),
    "ip_adapter_image": ("Any", "image prompts; the same as image_prompt"),
    "ip_adapter_image_embeds": ("Any", "image prompts as CLIP's features"),
}
"""Arguments of diffusers that are not another name alone: annotation and help."""


def keywords() -> str:
    """The text of ``canvax.pipelines.keywords``."""
    call, load = (signature(function).parameters for function in (canvax.Pipeline.__call__, canvax.load))
    first = ("self", "prompt", "negative_prompt", "output_type")
    helps = {name: field.setting.help for name, field in (declared(Call) | declared(OptionRecord)).items()}
    helps |= {"params": "the parameters, if the pipeline does not hold them"}
    helps |= {"adapters": "the strength of each loaded LoRA by name: {'ink': 0.8}"}
    keyword_only = {
        name: one.annotation for name, one in call.items() if name not in first and one.kind is one.KEYWORD_ONLY
    }
    options = {field.name: str(field.type) for field in fields(OptionRecord)}
    types = keyword_only | options | {name: call[name].annotation for name in first[1:3]}
    others = {name: (types[one.becomes], f"the same as {one.becomes}: {helps[one.becomes]}")
              for name, one in CALL.items() if one.becomes}  # fmt: skip
    others["guidance"] = (f"float | {types['guidance_method']} | None",
                          f"{others['guidance'][1]}; a rule, a function or a name is guidance_method")  # fmt: skip
    of_load = {name: (load[one.becomes].annotation, f"the same as {one.becomes}")
               for name, one in LOAD.items() if one.becomes}  # fmt: skip
    for name, values in HARMLESS.items():
        words = [f"Literal[{value}]" for value in values if value is not None]
        of_load[name] = (" | ".join([*words, "None"]), "changes nothing; for programs written for diffusers")
    again = {name: (types[name], helps[name]) for name in first[1:3]}
    again |= {"scale": ("float", "for an enlarged image: factor of width and height")}
    again |= {"overlap": ("int | None", "for an enlarged image: the fewest pixels that neighbouring tiles share")}
    again |= {"batch": ("int", "for an enlarged image: tiles at once")}
    parts = [
        _typed_dict("OptionFields", "TypedDict", "The fields of ``canvax.Options`` as keywords.",
                {name: (kind, helps[name]) for name, kind in options.items()}),
        _typed_dict("ForeignFields", "OptionFields", "The options, and names of other programs.", others | _SPECIAL),
        _typed_dict("CallFields", "ForeignFields", "The keywords of a call.",
                {name: (kind, helps[name]) for name, kind in keyword_only.items()}),
        _typed_dict("AgainFields", "CallFields", "The keywords of ``Pipeline.again``.", again),
        _typed_dict("LoadFields", "TypedDict", "Names of other programs for arguments of ``canvax.load``.", of_load),
    ]  # fmt: skip
    used = {word for kind in options.values() for word in re.findall(r"\w+", kind)}
    kinds = sorted(word for word in used & vars(canvax.call).keys() if getattr(vars(canvax.call)[word], "__args__", ()))
    return "\n\n".join([_IMPORTS.replace("CALL", ",\n    ".join(kinds)), *parts])


def _typed_dict(name: str, base: str, text: str, rows: Mapping[str, tuple[str, str]]) -> str:
    """A TypedDict whose keys have docstrings, which editors show."""
    lines = [f"class {name}({base}, total=False):", f'    """{text}"""', ""]
    for key, (annotation, help_text) in rows.items():
        first, *rest = wrap(f'"""{help_text[:1].upper()}{help_text[1:]}."""', 115)
        lines += [f"    {key}: {annotation}".replace("'", '"'), *(f"    {line}" for line in (first, *rest))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
