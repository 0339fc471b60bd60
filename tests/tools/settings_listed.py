"""The settings of a configuration, by name."""

import typing

from pydantic import BaseModel


def settings_of(model, prefix=""):
    """Every setting's path; of parties and tasks without their names."""
    for name, field in model.model_fields.items():
        inner = next(models_in(field.annotation), None)
        if inner is None:
            yield prefix + name
        else:
            yield from settings_of(inner, f"{prefix}{name}.")


def models_in(annotation):
    """The tables of settings in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)
