"""The reference pages, generated from the code so that they cannot contradict it."""

from __future__ import annotations

import csv
import inspect
import re
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

    from vfl.attacks import Grant
    from vfl.attacks.cases import OWN_COLUMNS
    from vfl.cli import app
    from vfl.cli.reference import registries
from vfl.config import Experiment, PartyFile
from vfl.core.errors import codes, page_of, title_of
from vfl.core.frame import Kind
from vfl.core.products import products
from vfl.core.registry import named
from vfl.experiments.scenarios import SCENARIOS, options_of, trace_for
from vfl.models.optimizers import TorchRegistry
from vfl.session.handshake import Introduction, PartyReport, SessionMessage
from vfl.session.ranges import default_ranges, limiting_settings
from vfl.session.terms import Terms

#: Files of settings, with a sentence about each.
FILES: Mapping[str, str] = {
    "EXPERIMENT.toml": "What all parties agree on; `vfl check` and `vfl train` read it.",
    "party.toml": "What belongs to one party, and what it consents to.",
    "horizontal.toml": "Clients that hold rows: `vfl horizontal`.",
    "llm.toml": "A party of a language model that is asked privately: `vfl llm`.",
}
RANGES = (
    "What a party accepts of the numbers of a session, and of a horizontal training; "
    "`[consent.ranges]` of its own file sets others. An option of a plug-in has the range that its "
    "class checks, and `defense.clipped_noise.norm = [0.5, 10]` narrows one. Names of parties are "
    "left out: `dp.clips` is each party's."
)
#: Public names that the Python page describes, by module.
PYTHON: Mapping[str, tuple[str, ...]] = {
    "vfl.experiments.notebook": ("train", "attack", "compare", "grid", "value", "Run"),
    "vfl.experiments.study": ("Results",),
    "vfl.estimators": ("VFLClassifier", "VFLRegressor"),
    "vfl.training.cutting": ("split", "CutModel"),
    "vfl.training.split": ("SplitModule",),
    "vfl.session.trace": ("read", "Recording"),
    "vfl.core.errors": ("VFLError",),
    "vfl.mpc": ("private",),
    "vfl.llm.private_decoder": ("PrivateDecoder",),
    "vfl.models.pretrained": ("load_pretrained", "load_tokenizer", "describe"),
    "vfl.compression.base": ("Codec",),
    "vfl.defenses.base": ("Defense",),
    "vfl.attacks.base": ("Attack",),
    "vfl.attacks.view": ("View",),
    "vfl.attacks.active.base": ("Adversary",),
    "vfl.testing": (
        "CodecContract",
        "DefenseContract",
        "AttackContract",
        "GradientAttackContract",
        "InputAttackContract",
        "AdversaryContract",
        "LinkContract",
        "HolderContract",
    ),
}
#: Beginning of the page of methods, and the columns of its file that hold paths.
FEATURES = (
    "*Thesis* is the dissertation on split learning and permuted secure computation that the "
    "project reproduces ([findings](../results/reproduction.md), [printed numbers]"
    "(../results/published.md)). A source names its first author. `-s` gives a setting, "
    "`vfl attack RUN --attack SPEC` runs an attack."
)
PATHS = ("files", "tests")
#: Modules whose docstrings describe frames and files, exactly enough to write another reader.
FORMATS: Mapping[str, str] = {
    "The frame": "vfl.core.frame",
    "The run folder": "vfl.config.run_folder",
    "Sealed files": "vfl.core.storage",
    "The trace": "vfl.session.trace.store",
}
#: Modules whose docstring is a protocol, exactly enough to write the other end.
PROTOCOLS: Mapping[str, str] = {
    "Keys of pairs, and what is sealed": "vfl.mpc.secure.keys",
    "Masks of a secure sum": "vfl.mpc.secure.sum",
    "Shared first layers": "vfl.mpc.secure.beaver",
    "DP-SGD on shares": "vfl.mpc.secure_dpsgd",
    "Payloads of codecs": "vfl.compression.coding",
    "Sizes of frames": "vfl.session.consent",
    "Memory of a session": "vfl.models.footprint",
}
#: Modules that describe the common properties of a family's members, by family.
SHARED: Mapping[str, str] = {"attacks": "vfl.attacks.labels.composed"}
#: Messages in JSON of a session, in the order in which they travel.
MESSAGES: Mapping[str, type[BaseModel]] = {
    "The session message": SessionMessage,
    "Its terms": Terms,
    "The introduction of a party": Introduction,
    "The last report": PartyReport,
}
#: Names that scikit-learn adds to a class, with references to its own pages.
_ROUTING = "set_fit_request, set_partial_fit_request, set_score_request"
_ITEM = re.compile(r" {4}(\w[\w, ]*): (.*)")


def write(folder: Path) -> None:
    """Write every page; an unchanged page is not touched, so it is not built again."""
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page by name."""
    return {
        "settings": settings_page(),
        "commands": commands_page(),
        "errors": errors_page(),
        "plugins": plugins_page(),
        "features": features_page(),
        "formats": formats_page(),
        "protocols": protocols_page(),
        "python": python_page(),
    }


def models_of_files() -> dict[str, Any]:
    """Return the model of each settings file, by the file's name."""
    models: dict[str, Any] = {"EXPERIMENT.toml": Experiment, "party.toml": PartyFile}
    for product in products().values():
        models |= {name: named(path) for name, path in product.files.items()}
    return models


def settings_page() -> str:
    """Every setting of every file with its type, default and meaning."""
    lines = ["# Settings", "", "A default that reads `-` means that the setting must be given.", ""]
    for name, model in models_of_files().items():
        lines += [f"## {name}", "", FILES[name], ""]
        for path, table in tables_of(model):
            if path:
                lines += [f"### [{path}] of {name}", ""]
            rows = list(rows_of(table))
            if rows:
                lines += ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
                lines += [f"| {' | '.join(row)} |" for row in rows]
                lines.append("")
    lines += ["## Ranges of terms", "", RANGES, "", "| number | usual range |", "| --- | --- |"]
    for name, (least, most) in default_ranges().items():
        lines.append(f"| `{name}` | {least:g} to {most:g} |")
    lines += [
        f"| `{name}` | `{setting}` of [consent] |" for name, setting in limiting_settings().items()
    ]
    return "\n".join([*lines, ""])


def tables_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Return a model and the tables below it, with dotted names."""
    yield path, model
    for name, field in model.model_fields.items():
        below = model_in(field.annotation)
        if below is not None:
            many = "NAME" if "dict" in str(field.annotation).lower() else ""
            yield from tables_of(below, ".".join(filter(None, (path, name, many))))


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in a field's type, single or repeated."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        if (found := model_in(part)) is not None:
            return found
    return None


def rows_of(model: type[BaseModel]) -> Iterator[list[str]]:
    """Return name, type, default and meaning of the settings that are not tables."""
    meanings = meanings_of(model)
    for name, field in model.model_fields.items():
        if model_in(field.annotation) is not None:
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "-" if default is PydanticUndefined else written(default)
        bounds = ", ".join(str(one) for one in field.metadata if not callable(one))
        kind = typed(field.annotation) + (f" ({plain(bounds)})" if limits(bounds) else "")
        yield [f"`{name}`", cell(kind), cell(shown), cell(meanings.get(name, ""))]


def limits(bounds: str) -> bool:
    """Whether metadata of pydantic is a bound that a reader understands."""
    return bool(re.fullmatch(r"((Ge|Gt|Le|Lt)\(\w+=[^)]*\)(, )?)+", bounds))


def plain(bounds: str) -> str:
    """Write bounds in mathematical form.

    >>> plain("Ge(ge=0), Lt(lt=5)")
    '>= 0, < 5'
    """
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return re.sub(r"\w+\((\w+)=([^)]*)\)", lambda m: f"{signs[m[1]]} {m[2]}", bounds)


def meanings_of(model: type) -> dict[str, str]:
    """Return each name's meaning from `Attributes` and `Args` of a class and its bases.

    A meaning that only names the class above leaves what that one says.
    """
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        for name, meaning in _items(inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            if name not in found or not re.fullmatch(r"see `\w+`\.", meaning):
                found[name] = meaning
    return found


def _items(text: str) -> Iterator[tuple[str, str]]:
    r"""Return the names in a docstring's `Attributes` and `Args`, with joined lines.

    >>> list(_items("Args:\n    a, b: one\n        line.\n\nRaises:\n    C: d"))
    [('a', 'one line.'), ('b', 'one line.')]
    """
    names, words, inside = [""], [""], False
    for line in [*text.splitlines(), "end"]:
        start = _ITEM.fullmatch(line) if inside else None
        if start or (line and not line.startswith(" ")):
            yield from ((name, " ".join(words)) for name in names if name)
            names, words = (
                ([one.strip() for one in start[1].split(",")], [start[2]]) if start else ([""], [])
            )
            inside = bool(start) or line in ("Attributes:", "Args:")
        elif line.strip():
            words.append(line.strip())


def typed(annotation: Any) -> str:
    """Write a type as a TOML user reads it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(written(one) for one in parts)
    if origin is typing.Annotated:
        return typed(parts[0])
    if origin in (tuple, list):
        return f"list of {typed(parts[0])}"
    if origin in (dict, Mapping):
        return f"table of {typed(parts[1])}"
    if parts:
        return " or ".join(typed(one) for one in parts if one is not type(None))
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def written(value: Any) -> str:
    """Write a value in TOML."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple | frozenset | set):
        return f"[{', '.join(map(written, value))}]"
    return str(value)


def cell(text: str) -> str:
    """Return text as one Markdown table cell."""
    return escaped(" ".join(text.split())).replace("|", "\\|").replace("\\\\|", "\\|")


def escaped(text: str) -> str:
    r"""Escape text outside code, so that Markdown takes no character for markup.

    >>> escaped("a * of `b * c`")
    'a \\* of `b * c`'
    """
    return re.sub(r"([*_<\[\]])(?=(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", text)


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "Exit codes: 0 means done, 1 a bug in vfl, 2 a mistake in your files or arguments, 3 a "
        "failure of another party or the network. 130 means an interrupt, 143 a termination. "
        "`advise`, `log`, `verify` and `privacy audit` also return 1 if a check failed.",
        "",
    ]
    for name, command in commands():
        lines += [f"## {name}", "", *_paragraphs(command.help or ""), ""]
        rows = []
        for one in command.params:
            if one.name in ("install_completion", "show_completion") or getattr(one, "hidden", 0):
                continue
            if one.param_type_name == "argument":
                shown, words = one.make_metavar(context(command)), getattr(one, "help", "") or ""
            else:
                shown, words = ", ".join(one.opts), one.help or ""
            default = one.default if not callable(one.default) else None
            known = default not in (None, False, (), [], "") and "Sentinel" not in repr(default)
            rows.append(f"| `{shown}` | {cell(words)} | {f'`{default}`' if known else ''} |")
        if rows:
            lines += [
                "| argument or option | meaning | default |",
                "| --- | --- | --- |",
                *rows,
                "",
            ]
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Any]]:
    """Return every command in `vfl --help`, with its full name."""

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if command.hidden:
            return
        if hasattr(command, "commands"):
            for own in command.commands:
                yield from below(f"{name} {own}", command.get_command(context(command), own))
        else:
            yield name, command

    yield from below("vfl", typer.main.get_command(app))


def context(command: Any) -> Any:
    """Context that click needs to write a metavar."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import click

    return click.Context(command)


def errors_page() -> str:
    """Return the page of all codes, as `vfl explain` shows them."""
    lines = ["# Error codes", "", "`vfl explain CODE` shows the same in the terminal.", ""]
    for code in codes():
        head, _, rest = page_of(code).partition("\n")
        assert head == f"# {code}: {title_of(code)}", code
        lines += [f"## {code}: {title_of(code)}", re.sub(r"^## ", "### ", rest, flags=re.M), ""]
    return "\n".join(lines)


def plugins_page() -> str:
    """Return the page of every registered name: its options, and its docstring's start."""
    lines = [
        "# Codecs, defenses, attacks and models",
        "",
        "A spec is a name and options: `randtopk:k=4,alpha=0.1`. `vfl list` shows the same names.",
        "",
    ]
    for family, registry in registries().items():
        lines += [f"## {family}", ""]
        if family in SHARED:
            lines += _blocks(inspect.getdoc(import_module(SHARED[family])) or "")
        if family == "attacks":
            lines += ["Goal and needs say which attacker it is; of several the first.", ""]
            lines += ["| goal | needs, at most | attacks as | reads |", "| --- | --- | --- | --- |"]
            lines += [f"| {' | '.join(row)} |" for row in attackers()] + [""]
        for name in registry.names():
            text = inspect.getdoc(registry.member(name)) or ""
            first = text.split("\n\n")
            words = first[:2] if len(first) > 1 and not _is_section(first[1]) else first[:1]
            also = [alias for alias, of in registry.aliases.items() if of == name]
            lines += [f"### {name}", "", *_paragraphs("\n\n".join(words)), ""]
            if options := registry.options(name):
                meanings = meanings_of(registry.member(name))
                lines += ["| option | default | meaning |", "| --- | --- | --- |"]
                for key, option in options.items():
                    given = option.default in (option.empty, None)
                    default = "-" if given else f"`{option.default}`"
                    # torch's own docstrings have another form; a member of ours must say it.
                    said = "as in torch" if isinstance(registry, TorchRegistry) else meanings[key]
                    meaning = cell(said.replace("``", "`"))
                    lines.append(f"| `{key}` | {default} | {meaning} |")
                lines.append("")
            if also:
                lines += [f"Also called: {', '.join(f'`{one}`' for one in also)}.", ""]
    return "\n".join(lines)


def attackers() -> Iterator[list[str]]:
    """Describe each attacker of a grid: goals, possible grants, identity, and data."""
    for one in SCENARIOS:
        grants = one.grants | (OWN_COLUMNS if one.own_columns else frozenset())
        names = ", ".join(f"`{grant.name}`" for grant in Grant if grant in grants)
        reads = [f"`{option}`" for option in options_of(trace_for([one]))] or ["nothing recorded"]
        yield [", ".join(one.goals), names, f"{one.attacker}, {one.name}", ", ".join(reads)]


def _is_section(text: str) -> bool:
    return text.lstrip().startswith((">>>", "Args:", "Attributes:", "Raises:", "Returns:"))


def _paragraphs(text: str) -> Iterable[str]:
    """Convert docstring text to Markdown: one line per paragraph, with markup escaped."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        yield escaped(" ".join(paragraph.split()).replace("``", "`"))
        yield ""


def _blocks(text: str) -> Iterable[str]:
    """Convert a module's docstring to Markdown; keep tables, and make steps a list."""
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            yield from ["```text", inspect.cleandoc(block), "```", ""]
        elif re.match(r"\d\. ", block):
            yield from [escaped(block.replace("``", "`")), ""]
        else:
            yield from _paragraphs(block)


def features_page() -> str:
    """The method, source, file and test of every row of `docs/features.csv`."""
    lines = ["# From papers to code", "", FEATURES, ""]
    path = Path(__file__).with_name("features.csv")
    area = ""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["area"] != area:
                area = row["area"]
                lines += ["", f"## {area}", "", "| method | command | source | files | tests |"]
                lines.append("| --- | --- | --- | --- | --- |")
            paths = (", ".join(f"`{one}`" for one in row[key].split(", ")) for key in PATHS)
            cells = (cell(row["method"]), row["command"], cell(row["source"]), *paths)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def formats_page() -> str:
    """The docstrings of modules that describe files and frames, their tables as tables."""
    lines = ["# File formats", "", "Enough to write a reader in another language.", ""]
    for title, module in FORMATS.items():
        text = (inspect.getdoc(import_module(module)) or "").split("\n\nA `Link` is")[0]
        lines += [f"## {title}", "", f"`{module}`", ""]
        for block in re.split(r"\n\s*\n", text):
            lines += _table(block) if block.startswith("    ") else _paragraphs(block)
        if title == "The frame":
            kinds = meanings_of(Kind)
            lines += ["| kind | name | payload |", "| --- | --- | --- |"]
            lines += [f"| {int(kind)} | {kind.name} | {cell(kinds[kind.name])} |" for kind in Kind]
            lines.append("")
    return "\n".join(lines)


def _table(block: str) -> Iterable[str]:
    r"""Convert a docstring's table, with columns two spaces apart, to Markdown.

    >>> list(_table("    a  b\n    1  what goes\n       on"))[2:]
    ['| 1 | what goes on |', '']
    """
    rows: list[list[str]] = []
    for line in inspect.cleandoc(block).splitlines():
        if line.startswith(" "):
            rows[-1][-1] += f" {line.strip()}"
        else:
            rows.append(re.split(r" {2,}", line))
    yield f"| {' | '.join(rows[0])} |"
    yield f"| {' | '.join('---' for _ in rows[0])} |"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rows[1:])
    yield ""


def protocols_page() -> str:
    """Return the docstrings of modules that describe the protocols."""
    lines = ["# Protocols", "", "What travels, byte by byte; [frames](formats.md) carry it.", ""]
    for title, module in PROTOCOLS.items():
        text = inspect.getdoc(import_module(module)) or ""
        lines += [f"## {title}", "", f"`{module}`", ""]
        lines += _blocks(text)
    lines += ["## Messages", "", "A message with a value outside its range is refused.", ""]
    for title, model in MESSAGES.items():
        lines += [f"### {title}", "", "| field | type | range | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        meanings = meanings_of(model)
        for name, field in model.model_fields.items():
            row = (typed(field.annotation), range_of(field), meanings.get(name, ""))
            lines.append(f"| `{name}` | {' | '.join(map(cell, row))} |")
        lines.append("")
    return "\n".join(lines)


def range_of(field: FieldInfo) -> str:
    """Range of a field: numbers, lengths and the pattern of texts.

    >>> range_of(Introduction.model_fields["rows"])
    '>= 0, < 1099511627776'
    """
    known = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "max_length": "length <="}
    found = []
    for one in field.metadata:
        for key, sign in known.items():
            if (bound := getattr(one, key, None)) is not None:
                found.append(f"{sign} {bound}")
        if pattern := getattr(one, "pattern", None):
            found.append(f"`{pattern}`")
    return ", ".join(found)


def python_page() -> str:
    """Directives for Sphinx, which reads the docstrings."""
    lines = ["# Python", ""]
    for module, names in PYTHON.items():
        lines += [f"## {module}", "", "```{eval-rst}", f".. currentmodule:: {module}", ""]
        for name in names:
            kind = "class" if inspect.isclass(_member(module, name)) else "function"
            below = ["   :members:", f"   :exclude-members: {_ROUTING}"] if kind == "class" else []
            lines += [f".. auto{kind}:: {name}", *below, ""]
        lines += ["```", ""]
    return "\n".join(lines)


def _member(module: str, name: str) -> Any:
    return getattr(__import__(module, fromlist=[name]), name)
