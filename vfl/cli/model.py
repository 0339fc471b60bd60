"""``vfl model``: pretrained models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import argument, emit, say

if TYPE_CHECKING:
    from vfl.models.pretrained import Part

app = typer.Typer(help="Pretrained models on this machine.", no_args_is_help=True)
_JSON = typer.Option("--json", help="Print one JSON document instead.")


@app.command("add")
def add(
    source: Annotated[
        str,
        argument(
            "A folder in the Hugging Face layout; a .gguf or .zip file; word vectors as .txt, .vec "
            "or .npy; package:NAME of an installed package that ships one of these; or "
            "hub:ORG/NAME, which uses the network.",
        ),
    ],
    name: Annotated[str, argument("Name that experiment files use, such as smollm2.")],
) -> None:
    """Add a pretrained model to the folder of models, under a name.

    The environment variable VFL_MODELS sets the folder; the default is ~/.cache/vfl/models.
    """
    from vfl.models.collect import collect
    from vfl.models.pretrained import model_folder

    folder = model_folder(name)
    collect(source, folder)
    say(f"the model is in {folder}")
    _print(_facts(folder))


@app.command("show")
def show(
    model: Annotated[str, argument("Name of a model, or its folder.")],
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Describe a pretrained model: its family, its size, and the layers where it can be split."""
    from vfl.models.pretrained import existing_model

    folder = Path(model)
    facts = _facts(folder if folder.is_dir() else existing_model(model))
    if json:
        emit(facts)
    else:
        _print(facts)


@app.command("list")
def list_models(json: Annotated[bool, _JSON] = False) -> None:
    """List the pretrained models in the folder of models."""
    from vfl.models.pretrained import CONFIG, models_folder

    names = sorted(each.parent.name for each in models_folder().glob(f"*/{CONFIG}"))
    if json:
        emit(names)
        return
    for name in names:
        print(name)
    if not names:
        say(f"{models_folder()} has no model; `vfl model add SOURCE NAME` adds one")


def _facts(folder: Path) -> dict[str, Any]:
    from vfl.models.pretrained import TOKENIZER, family_of, parts_of

    facts: dict[str, Any] = {"folder": str(folder), "family": family_of(folder)}
    facts["tokenizer"] = (folder / TOKENIZER).is_file()
    return facts | {"parts": {part: _part(folder, part) for part in parts_of(folder)}}


def _part(folder: Path, part: Part) -> dict[str, Any]:
    from vfl.models.pretrained import describe

    found = describe(folder, part)
    shape = found.shape
    settings = ("layers", "width", "heads", "groups", "inner", "vocabulary", "context", "classes")
    facts = {name: getattr(shape, name) for name in settings if hasattr(shape, name)}
    weights = sum(each.numel() for each in found.empty().parameters())
    return facts | {
        "weights": weights,
        "float32_bytes": 4 * weights,
        "file_bytes": found.weights.file_bytes,
        "cut_bytes_per_token": 4 * shape.width,
    }


def _print(facts: dict[str, Any]) -> None:
    print(f"{facts['family']} in {facts['folder']}")
    print(f"tokenizer: {'yes' if facts['tokenizer'] else 'none (tokens are numbers)'}")
    for name, part in facts["parts"].items():
        if name != "whole":
            print(f"tower {name}")
        sizes = ", ".join(
            f"{each} {part[each]}"
            for each in ("layers", "width", "heads", "groups", "vocabulary", "context", "classes")
            if part.get(each)
        )
        print(sizes)
        print(
            f"{part['weights'] / 1e6:,.1f} million weights: {part['float32_bytes'] / 1e6:,.0f} MB "
            f"in memory, {part['file_bytes'] / 1e6:,.0f} MB of files"
        )
        print(
            f"cuts: behind the embedding and each of {part['layers']} blocks, "
            f"{part['cut_bytes_per_token']:,} bytes a token in float32"
        )
