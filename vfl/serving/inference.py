"""The Open Inference Protocol (KServe v2) over REST, with JSON or binary tensors.

Field names and routes are from the specification, `inference_rest.md` of
github.com/kserve/open-inference-protocol, and from its extension `binary_tensor_data`. The
protocol's model name is the label party's name, and its model version is the run. In a request, the
tensor `ids` with shape (rows,) or (rows, 1) identifies the rows; each further tensor contains a
column of the label party and has the column's name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vfl.core.version import VERSION
from vfl.datasets.table import Classes

LIVE, READY = "/v2/health/live", "/v2/health/ready"
_MODEL = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
INFER = re.compile(f"{_MODEL}/infer")
IDS = "ids"
_ID_LETTERS = 256
#: HTTP header with the size in bytes of a body's JSON; binary tensors follow after the JSON.
JSON_BYTES = b"inference-header-content-length"
_SIZE, _SIZE_DIGITS = "binary_data_size", 20

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES",
]  # fmt: skip


class FormError(ValueError):
    """Error for a request that violates the protocol, or whose tensors do not fit the model."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class RequestInput(_Part):
    """`$request_input`: a tensor, whose elements are in `data` or follow the JSON as bytes."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=2)]
    datatype: Datatype
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None

    def take(self, binary: bytes) -> bytes:
        """Read the tensor's elements if they are binary; return the bytes that follow this tensor.

        Raises:
            FormError: the tensor has no elements, or their size or format is wrong.
        """
        size = (self.parameters or {}).get(_SIZE)
        if (size is None) is (self.data is None):
            raise FormError("a tensor has either elements in JSON or a size of binary data")
        if size is None:
            return binary
        if type(size) is not int or not 0 <= size <= len(binary):
            raise FormError("the size of a binary tensor does not match its shape")
        self.data = _read_binary(binary[:size], self.datatype, self.shape[0])
        return binary[size:]

    def elements(self) -> list[Any]:
        """Return the elements of the tensor, axes (rows,).

        Raises:
            FormError: the elements do not fit the tensor's shape or datatype, or a row has more
                than one element.
        """
        assert self.data is not None, "`take` was called"
        rows, *each = self.shape
        nested = len(self.shape) == 2 and all(isinstance(row, list) for row in self.data)
        flat = [cell for row in self.data for cell in row] if nested else self.data
        if math.prod(each) != 1 or len(flat) != rows:
            raise FormError("a tensor's shape is neither (rows,) nor (rows, 1)")
        if not all(cell is None or isinstance(cell, _CELLS[self._kind]) for cell in flat):
            raise FormError("an element of a tensor does not have the tensor's datatype")
        if self._kind != "BOOL" and any(isinstance(cell, bool) for cell in flat):
            raise FormError("an element of a tensor does not have the tensor's datatype")
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


#: NumPy's type of the numbers in a binary tensor, by datatype.
_NUMBERS: Mapping[str, str] = {
    "BOOL": "?",
    **{f"INT{8 * width}": f"<i{width}" for width in (1, 2, 4, 8)},
    **{f"UINT{8 * width}": f"<u{width}" for width in (1, 2, 4, 8)},
    **{f"FP{8 * width}": f"<f{width}" for width in (2, 4, 8)},
}


def _read_binary(raw: bytes, datatype: str, rows: int) -> list[Any]:
    """Return the elements of a binary tensor of numbers; NaN becomes a missing value."""
    if datatype == "BYTES":
        return _read_texts(raw, rows)
    kind = np.dtype(_NUMBERS[datatype])
    if len(raw) != rows * kind.itemsize or (datatype == "BOOL" and max(raw, default=0) > 1):
        raise FormError("a binary tensor does not have its shape and datatype")
    return [None if cell != cell else cell for cell in np.frombuffer(raw, kind).tolist()]


def _read_texts(raw: bytes, rows: int) -> list[str]:
    """Read texts; before each text, an unsigned 32-bit integer states its number of bytes."""
    found, at = list[str](), 0
    while at < len(raw) and len(found) < rows:
        start = at + 4
        at = start + int.from_bytes(raw[at:start], "little")
        try:
            found.append(raw[start:at].decode())
        except UnicodeDecodeError:
            raise FormError("a text of a binary tensor is not UTF-8") from None
    if at != len(raw) or len(found) != rows:
        raise FormError("a binary tensor does not have its shape and datatype")
    return found


def _binary(cells: Sequence[Any], datatype: str) -> bytes:
    if datatype != "BYTES":
        return np.array(cells, dtype=_NUMBERS[datatype]).tobytes()
    texts = [cell.encode() for cell in cells]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


class RequestOutput(_Part):
    """`$request_output`: names a tensor that the client requests."""

    name: str
    parameters: dict[str, Any] | None = None


class InferenceRequest(_Part):
    """`$inference_request`."""

    id: Annotated[str, Field(max_length=_ID_LETTERS)] | None = None
    parameters: dict[str, Any] | None = None
    inputs: Annotated[list[RequestInput], Field(min_length=1)]
    outputs: list[RequestOutput] | None = None

    @classmethod
    def read(cls, body: bytes, json_bytes: int | None = None) -> InferenceRequest:
        """Parse a request from its body.

        Args:
            body: JSON, followed by binary tensors.
            json_bytes: size of the JSON in bytes; None if the body contains only JSON.

        Raises:
            FormError: the request is invalid; the error's text does not contain values of the
                request.
        """
        try:
            request = cls.model_validate_json(body[:json_bytes])
        except ValidationError:  # the text of this error quotes the request
            raise FormError("the body is no inference request of the protocol") from None
        left = b"" if json_bytes is None else body[json_bytes:]
        for each in request.inputs:
            left = each.take(left)
        if left:
            raise FormError("bytes remain after the last binary tensor of the body")
        return request

    def binary_outputs(self, names: Sequence[str]) -> set[str]:
        """Return the names of the outputs that the client requests in binary format."""
        whole = (self.parameters or {}).get("binary_data_output", False)
        asked = {each.name: each.parameters or {} for each in self.outputs or ()}
        return {one for one in names if asked.get(one, {}).get("binary_data", whole) is True}

    def question(self) -> dict[str, Any]:
        """Convert the request to the body of a `POST /predict` request.

        Raises:
            FormError: see `RequestInput.elements`; or a required tensor is missing or repeated.
        """
        tensors = {each.name: each for each in self.inputs}
        if len(tensors) < len(self.inputs) or IDS not in tensors:
            raise FormError(
                f"a request must contain the tensor '{IDS}' and the label party's columns, each "
                "once"
            )
        ids = tensors.pop(IDS).elements()
        columns = {name: each.elements() for name, each in tensors.items()}
        return {"ids": ids, "columns": columns or None}


def server_metadata() -> dict[str, Any]:
    """`$metadata_server_response`."""
    return {"name": "vfl", "version": VERSION, "extensions": ["binary_tensor_data"]}


def model_metadata(
    name: str, version: str, columns: Sequence[str], classes: Classes | None
) -> dict[str, Any]:
    """Return `$metadata_model_response`.

    A request contains either all of `columns` or no column.
    """
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
) -> tuple[dict[str, Any], bytes]:
    """Return `$inference_response`, built from each row's record of `POST /predict`.

    Returns:
        The JSON part, followed by the binary tensors in the order of the outputs.

    Raises:
        FormError: the client requested an output that the model does not have.
    """
    known = _outputs(classes)
    wanted = [*known] if asked.outputs is None else [each.name for each in asked.outputs]
    if unknown := [each for each in wanted if each not in known]:
        raise FormError(
            f"the model does not have {len(unknown)} of {len(wanted)} requested outputs"
        )
    whole: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": []}
    whole |= {} if asked.id is None else {"id": asked.id}
    packed, binary = b"", asked.binary_outputs(wanted)
    for one in dict.fromkeys(wanted):
        kind, width = known[one]
        cells = [cell for row in rows for cell in _cells(one, row, kind)]
        told = {"name": one, "shape": [len(rows), *width], "datatype": kind}
        if one in binary:
            packed += (data := _binary(cells, kind))
            whole["outputs"].append(told | {"parameters": {_SIZE: len(data)}})
        else:
            whole["outputs"].append(told | {"data": cells})
    return whole, packed


def empty_bytes(asked: InferenceRequest, name: str, version: str, classes: Classes | None) -> int:
    """Return the largest size in bytes of a response, without the elements of its tensors."""
    empty, _ = response(asked, name, version, classes, ())
    return len(json.dumps(empty).encode()) + 2 * _SIZE_DIGITS * len(_outputs(classes))


def _outputs(classes: Classes | None) -> dict[str, tuple[str, list[int]]]:
    """Return each output's datatype and its axes after the row axis."""
    if classes is None:
        found: dict[str, tuple[str, list[int]]] = {"prediction": ("FP64", [])}
    else:
        found = {
            "prediction": ("INT64" if all(type(one) is int for one in classes) else "BYTES", []),
            "probabilities": ("FP64", [len(classes)]),
        }
    # Outputs of type text: the missing parties, and the model's remarks on a row as JSON.
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
