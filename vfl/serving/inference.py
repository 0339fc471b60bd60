"""The Open Inference Protocol (KServe v2) for a service: REST, with JSON tensors.

Names of fields and routes are those of its specification, `inference_rest.md` of
github.com/kserve/open-inference-protocol. The model has the label party's name, and its version is
the run. Rows come as the tensor `ids`, of shape (rows,) or (rows, 1), and the label party's own
columns as tensors with their names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vfl.core.version import VERSION
from vfl.datasets.table import Classes

LIVE, READY = "/v2/health/live", "/v2/health/ready"
_MODEL = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
INFER = re.compile(f"{_MODEL}/infer")
IDS = "ids"
_ID_LETTERS = 256

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES",
]  # fmt: skip


class FormError(ValueError):
    """A request violates the protocol, or has other tensors than the model."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class RequestInput(_Part):
    """`$request_input`: a tensor with its elements in `data`, flat or row by row."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=2)]
    datatype: Datatype
    parameters: dict[str, Any] | None = None
    data: list[Any]

    def elements(self) -> list[Any]:
        """Elements of the tensor, axes (rows,).

        Raises:
            FormError: the elements do not fit its shape or datatype, or a row has more than one.
        """
        rows, *each = self.shape
        nested = len(self.shape) == 2 and all(isinstance(row, list) for row in self.data)
        flat = [cell for row in self.data for cell in row] if nested else self.data
        if math.prod(each) != 1 or len(flat) != rows:
            raise FormError("a tensor does not have its shape, (rows,) or (rows, 1)")
        if not all(cell is None or isinstance(cell, _CELLS[self._kind]) for cell in flat):
            raise FormError("an element of a tensor has another datatype")
        if self._kind != "BOOL" and any(isinstance(cell, bool) for cell in flat):
            raise FormError("an element of a tensor has another datatype")
        return flat

    @property
    def _kind(self) -> str:
        return self.datatype.removeprefix("U").rstrip("0123456789")


_CELLS: Mapping[str, type | tuple[type, ...]] = {
    "BOOL": bool,
    "INT": int,
    "FP": (int, float),
    "BYTES": str,
}


class RequestOutput(_Part):
    """`$request_output`: a requested tensor."""

    name: str
    parameters: dict[str, Any] | None = None


class InferenceRequest(_Part):
    """`$inference_request`."""

    id: Annotated[str, Field(max_length=_ID_LETTERS)] | None = None
    parameters: dict[str, Any] | None = None
    inputs: Annotated[list[RequestInput], Field(min_length=1)]
    outputs: list[RequestOutput] | None = None

    @classmethod
    def read(cls, body: bytes) -> InferenceRequest:
        """Parse a request from its JSON.

        Raises:
            FormError: the request is invalid; its text is not quoted.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError:  # it quotes the request
            raise FormError("the body is no inference request of the protocol") from None

    def question(self) -> dict[str, Any]:
        """Convert the request to the body of `POST /predict`.

        Raises:
            FormError: see `RequestInput.elements`; or a tensor is missing or repeated.
        """
        tensors = {each.name: each for each in self.inputs}
        if len(tensors) < len(self.inputs) or IDS not in tensors:
            raise FormError(f"the tensors are '{IDS}' and own columns, each once")
        ids = tensors.pop(IDS).elements()
        columns = {name: each.elements() for name, each in tensors.items()}
        return {"ids": ids, "columns": columns or None}


def server_metadata() -> dict[str, Any]:
    """`$metadata_server_response`."""
    return {"name": "vfl", "version": VERSION, "extensions": []}


def model_metadata(
    name: str, version: str, columns: Sequence[str], classes: Classes | None
) -> dict[str, Any]:
    """`$metadata_model_response`: own columns are optional; a request has all or none."""
    inputs = [(IDS, "BYTES"), *((column, "BYTES") for column in columns)]
    return {
        "name": name,
        "versions": [version],
        "platform": "vfl",
        "inputs": [{"name": one, "datatype": kind, "shape": [-1]} for one, kind in inputs],
        "outputs": [
            {"name": one, "datatype": kind, "shape": [-1, *width]}
            for one, (kind, width) in _outputs(classes).items()
        ],
    }


def response(
    asked: InferenceRequest,
    name: str,
    version: str,
    classes: Classes | None,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Make `$inference_response` from the answers of `POST /predict` for each row.

    Raises:
        FormError: a requested output does not exist in the model.
    """
    known = _outputs(classes)
    wanted = [*known] if asked.outputs is None else [each.name for each in asked.outputs]
    if unknown := [each for each in wanted if each not in known]:
        raise FormError(f"the model has no such output: {len(unknown)} of {len(wanted)}")
    whole: dict[str, Any] = {"model_name": name, "model_version": version}
    whole |= {} if asked.id is None else {"id": asked.id}
    return whole | {
        "outputs": [
            {
                "name": one,
                "shape": [len(rows), *known[one][1]],
                "datatype": known[one][0],
                "data": [cell for row in rows for cell in _cells(one, row, known[one][0])],
            }
            for one in dict.fromkeys(wanted)
        ]
    }


def empty_bytes(asked: InferenceRequest, name: str, version: str, classes: Classes | None) -> int:
    """Bytes of a response with empty tensors, with room for its numbers of rows."""
    outputs = len(_outputs(classes))
    return len(json.dumps(response(asked, name, version, classes, ())).encode()) + 20 * outputs


def _outputs(classes: Classes | None) -> dict[str, tuple[str, list[int]]]:
    """Datatype of each output, and its axes besides the rows."""
    if classes is None:
        found: dict[str, tuple[str, list[int]]] = {"prediction": ("FP64", [])}
    else:
        found = {
            "prediction": ("INT64" if all(type(one) is int for one in classes) else "BYTES", []),
            "probabilities": ("FP64", [len(classes)]),
        }
    # Texts: missing parties, and JSON of the model's remarks on a row.
    return found | {"missing": ("BYTES", []), "remarks": ("BYTES", [])}


def _cells(output: str, row: Mapping[str, Any], datatype: str) -> list[Any]:
    if output == "probabilities":
        return list(row["probabilities"])
    if output == "missing":
        return [",".join(row.get("missing", ()))]
    if output == "remarks":
        known = ("prediction", "probabilities", "missing")
        said = {name: value for name, value in row.items() if name not in known}
        return [json.dumps(said) if said else ""]
    said = row["prediction"]
    return [str(said) if datatype == "BYTES" else said]
