"""The Open Inference Protocol: fields as its specification names them, answers as `/predict`."""

import http.client
import json
import struct
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import predicted, same

from vfl.serving import inference
from vfl.serving.front import Model
from vfl.serving.inference import JSON_BYTES, FormError, InferenceRequest

#: Fields of the objects of `inference_rest.md`, and which of them may be left out.
FIELDS = {
    "live_server": ({"live"}, {"ready"}),  # the document says `live`, servers say `ready`
    "ready_model": ({"name", "ready"}, set()),
    "metadata_server": ({"name", "version", "extensions"}, set()),
    "metadata_model": ({"name", "platform", "inputs", "outputs"}, {"versions"}),
    "metadata_tensor": ({"name", "datatype", "shape"}, set()),
    "inference_response": ({"model_name", "outputs"}, {"model_version", "id", "parameters"}),
    "response_output": ({"name", "shape", "datatype", "data"}, {"parameters"}),
}
DATATYPES = {"BOOL", "BYTES", "FP16", "FP32", "FP64"} | {
    f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)
}

#: Stands for an id that the service knows.
KNOWN = "a known id"


def of_protocol(told, kind):
    required, optional = FIELDS[kind]
    assert required <= told.keys() <= required | optional
    return told


def tensor(name, data, datatype="BYTES", shape=None):
    return {"name": name, "shape": shape or [len(data)], "datatype": datatype, "data": data}


def get(client, path, status=200, **more):
    got, text = client.ask(path, **more)
    assert got == status, text
    return json.loads(text)


def infer(client, *inputs, path="/v2/models/label/infer", **more):
    status, text = client.ask(path, {"inputs": inputs, **more})
    return status, json.loads(text)


def test_answers_are_those_of_predict_in_fields_of_the_protocol(local, trained_run):
    client, expected = local(), predicted(trained_run)
    ids = list(expected)[:7]
    status, told = infer(client, tensor("ids", ids), id="mine")
    assert status == 200
    of_protocol(told, "inference_response")
    assert (told["model_name"], told["model_version"], told["id"]) == ("label", "run", "mine")
    outputs = {each["name"]: of_protocol(each, "response_output") for each in told["outputs"]}
    assert {each["datatype"] for each in outputs.values()} <= DATATYPES
    assert outputs["prediction"]["shape"] == [7]
    rows, classes = outputs["probabilities"]["shape"]
    shares = outputs["probabilities"]["data"]
    assert len(shares) == rows * classes
    for at, each in enumerate(ids):
        answer = {
            "prediction": outputs["prediction"]["data"][at],
            "probabilities": shares[at * classes : (at + 1) * classes],
        }
        assert same(answer, expected[each])


def test_metadata_and_health_have_fields_of_the_protocol(refusing):
    client = refusing
    of_protocol(get(client, "/v2"), "metadata_server")
    for path in ("/v2/models/label", "/v2/models/label/versions/run"):
        told = of_protocol(get(client, path), "metadata_model")
        assert told["versions"] == ["run"]
        for each in (*told["inputs"], *told["outputs"]):
            assert of_protocol(each, "metadata_tensor")["datatype"] in DATATYPES
        ready = of_protocol(get(client, f"{path}/ready"), "ready_model")
        assert ready == {"name": "label", "ready": True}
    for path in (inference.LIVE, inference.READY):
        assert of_protocol(get(client, path, token=""), "live_server")["live"] is True
    assert get(client, "/v2/models/label", 401, token="wrong" * 8)["error"]


def test_asked_outputs_come_alone_and_numbers_are_ids(local, trained_run):
    client, (first, *_) = local(), predicted(trained_run)
    status, told = infer(
        client,
        tensor("ids", [[int(first)]], "INT64", [1, 1]),
        outputs=[{"name": "probabilities"}],
    )
    assert status == 200
    assert [each["name"] for each in told["outputs"]] == ["probabilities"]
    assert "id" not in told


def test_answers_about_as_many_rows_are_of_one_length(local, trained_run):
    client, ids = local(), list(predicted(trained_run))
    lengths = {
        len(client.ask("/v2/models/label/infer", {"inputs": [tensor("ids", [each])]})[1])
        for each in ids[:20]
    }
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("inputs", "more", "status"),
    [
        ([], {}, 422),
        ([{"name": "ids"}], {}, 422),
        ([tensor("rows", ["1"])], {}, 422),
        ([tensor("ids", ["1"]), tensor("ids", ["1"])], {}, 422),
        ([tensor("ids", ["1", "2"], shape=[1])], {}, 422),
        ([tensor("ids", ["1", "2"], shape=[1, 2])], {}, 422),
        ([tensor("ids", ["1"], shape=[-1])], {}, 422),
        ([tensor("ids", [], shape=[0])], {}, 422),
        ([tensor("ids", [1], "BYTES")], {}, 422),
        ([tensor("ids", ["1"], "INT64")], {}, 422),
        ([tensor("ids", [True], "INT64")], {}, 422),
        ([tensor("ids", [1.5], "FP64")], {}, 404),
        ([tensor("ids", [None])], {}, 422),
        ([tensor("ids", ["1"], "STRING")], {}, 422),
        ([tensor("ids", ["absent"])], {}, 404),
        ([tensor("ids", [KNOWN]), tensor("other", [1.0], "FP64")], {}, 422),
        ([tensor("ids", [str(each) for each in range(300)])], {}, 413),
        ([tensor("ids", [KNOWN])], {"outputs": [{"name": "gradients"}]}, 422),
        ([tensor("ids", [KNOWN])], {"id": "x" * 257}, 422),
    ],
)
def test_what_is_not_of_the_protocol_or_the_model_is_refused(
    refusing, trained_run, inputs, more, status
):
    known = next(iter(predicted(trained_run)))
    got, told = infer(refusing, *json.loads(json.dumps(inputs).replace(KNOWN, known)), **more)
    assert (got, type(told["error"])) == (status, str)
    assert "x" * 257 not in told["error"]


@pytest.mark.parametrize("path", ["/v2/models/other/infer", "/v2/models/label/versions/1/infer"])
def test_another_model_or_version_is_told_by_name(refusing, path):
    status, told = infer(refusing, tensor("ids", [KNOWN]), path=path)
    assert status == 404
    assert told["code"] in ("model", "version")


def test_the_budget_counts_rows_of_either_way(local, trained_run):
    client, ids = local(max_rows_per_day=5), list(predicted(trained_run))
    assert client.predict(*ids[:3])[0] == 200
    status, told = infer(client, tensor("ids", ids[:3]))
    assert (status, told["code"]) == (429, "rows")
    assert infer(client, tensor("ids", ids[:2]))[0] == 200


def test_missing_parties_and_remarks_are_texts():
    asked = InferenceRequest.read(json.dumps({"inputs": [tensor("ids", ["1"])]}).encode())
    rows = [
        {"prediction": "no", "probabilities": [0.5, 0.5], "missing": ["bank", "shop"]},
        {"prediction": "yes", "probabilities": [0.1, 0.9], "points": 7},
    ]
    told, binary = inference.response(asked, "label", "run", ("no", "yes"), rows)
    assert not binary
    cells = {each["name"]: each["data"] for each in told["outputs"]}
    assert cells["missing"] == ["bank,shop", ""]
    assert [json.loads(each or "{}") for each in cells["remarks"]] == [{}, {"points": 7}]
    assert cells["prediction"] == ["no", "yes"]
    assert json.loads(json.dumps(told)) == told


def test_a_body_that_is_no_json_is_not_repeated():
    with pytest.raises(FormError) as caught:
        InferenceRequest.read(b"secret{")
    assert "secret" not in str(caught.value)


# Binary tensors


def packed(name, datatype, raw, rows, **more):
    """A tensor behind the JSON, and its bytes."""
    told = {"name": name, "shape": [rows], "datatype": datatype}
    return told | {"parameters": {"binary_data_size": len(raw)}} | more, raw


def texts(*cells):
    return b"".join(struct.pack("<I", len(cell.encode())) + cell.encode() for cell in cells)


def body_of(*tensors, **more):
    """JSON, and the whole body."""
    whole = json.dumps({"inputs": [told for told, _ in tensors], **more}).encode()
    return whole, whole + b"".join(raw for _, raw in tensors)


def ask_binary(client, whole, body):
    """Status, headers and body of one request with binary tensors."""
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {client.token}"}
    headers["Inference-Header-Content-Length"] = str(whole)
    try:
        connection.request("POST", "/v2/models/label/infer", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def unpacked(headers, body):
    """Elements by output, read as the extension's document says."""
    assert headers["Content-Type"] == "application/octet-stream"
    size = int(headers["Inference-Header-Content-Length"])
    found, at = {}, size
    for each in json.loads(body[:size])["outputs"]:
        if (length := each.get("parameters", {}).get("binary_data_size")) is None:
            found[each["name"]] = each["data"]
            continue
        raw, at = body[at : at + length], at + length
        assert "data" not in each
        if each["datatype"] == "BYTES":
            cells = []
            while raw:
                (count,) = struct.unpack("<I", raw[:4])
                cells, raw = [*cells, raw[4 : 4 + count].decode()], raw[4 + count :]
            found[each["name"]] = cells
        else:
            kind = {"FP64": "<f8", "INT64": "<i8"}[each["datatype"]]
            found[each["name"]] = np.frombuffer(raw, kind).reshape(each["shape"]).tolist()
    assert at == len(body)
    return found


@pytest.mark.parametrize("kind", ["BYTES", "INT64"])
@pytest.mark.parametrize(
    "more",
    [
        {"parameters": {"binary_data_output": True}},
        {
            "outputs": [
                {"name": "probabilities", "parameters": {"binary_data": True}},
                {"name": "prediction"},
            ]
        },
    ],
    ids=["all", "one"],
)
def test_binary_tensors_hold_what_json_holds(local, trained_run, kind, more):
    client, expected = local(), predicted(trained_run)
    ids, lengths = list(expected)[:5], set()
    for some in (ids[:2], ids[2:4]):
        raw = texts(*some) if kind == "BYTES" else np.array([*map(int, some)], "<i8").tobytes()
        whole, body = body_of(packed("ids", kind, raw, 2), **more)
        status, headers, answer = ask_binary(client, len(whole), body)
        assert status == 200, answer
        outputs = unpacked(headers, answer)
        for at, each in enumerate(some):
            answered = {name: outputs[name][at] for name in ("prediction", "probabilities")}
            assert same(answered, expected[each])
        lengths.add((len(answer), len(headers["Inference-Header-Content-Length"])))
    assert len(lengths) == 1


IDS, _RAW = packed("ids", "BYTES", texts("1", "2"), 2)


@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        (IDS, _RAW[:-1]),
        (IDS, _RAW + b"x"),
        (IDS | {"data": ["1", "2"]}, _RAW),
        (IDS | {"shape": [1]}, _RAW),
        (IDS | {"shape": [10**30]}, _RAW),
        (IDS | {"datatype": "INT64"}, _RAW),
        (IDS | {"datatype": "BOOL", "shape": [len(_RAW)]}, _RAW),
        *(
            (IDS | {"parameters": {"binary_data_size": size}}, _RAW)
            for size in (-1, 9e9, True, "9")
        ),
        packed("ids", "BYTES", struct.pack("<I", 2**32 - 1) + b"1", 1),
        packed("ids", "BYTES", texts("1") + b"\0\0", 1),
        packed("ids", "BYTES", struct.pack("<I", 1) + b"\xff", 1),
        packed("ids", "FP64", struct.pack("<d", float("nan")), 1),
        packed("ids", "FP64", struct.pack("<d", float("inf")), 1),
        packed("ids", "BOOL", b"\1", 1),
    ],
)
def test_binary_tensors_of_another_form_are_refused(refusing, tensor, raw):
    whole, body = body_of((tensor, raw))
    status, _, answer = ask_binary(refusing, len(whole), body)
    assert (status, json.loads(answer)["code"]) == (422, "form")


@pytest.mark.parametrize("size", [0, 10**9, "-1", "1e2", "7x"])
def test_a_size_of_json_that_is_none_is_refused(refusing, size):
    _, body = body_of((IDS, _RAW))
    status, _, answer = ask_binary(refusing, size, body)
    assert (status, json.loads(answer)["code"]) == (422, "form")


NUMBERS = sorted(DATATYPES - {"BYTES"})


@given(st.data())
def test_a_binary_tensor_is_the_numbers_that_were_written(data):
    kind = data.draw(st.sampled_from(NUMBERS))
    dtype = np.dtype(kind.lower().replace("fp", "float")).newbyteorder("<")
    raw = data.draw(
        st.binary(max_size=32).map(lambda raw: raw[: len(raw) // dtype.itemsize * dtype.itemsize])
    )
    if kind == "BOOL":
        raw = bytes(each & 1 for each in raw)
    told, _ = packed("ids", kind, raw, len(raw) // dtype.itemsize)
    if not raw:
        return
    whole, body = body_of((told, raw))
    (read,) = InferenceRequest.read(body, len(whole)).inputs
    wanted = [None if cell != cell else cell for cell in np.frombuffer(raw, dtype).tolist()]
    assert read.elements() == wanted


def test_the_longest_answer_fits_its_length_in_binary_too():
    asked = InferenceRequest.read(
        json.dumps(
            {"inputs": [tensor("ids", ["1"])], "parameters": {"binary_data_output": True}}
        ).encode()
    )
    model = Model("run", None, ("no", "yes" * 9), ("bank", "shop", "label"))
    answers = {"prediction": "yes" * 9, "probabilities": [0.0, 1.0], "missing": ["bank", "shop"]}
    for rows in (1, 7, 300):
        about = "label", "run", model.classes
        whole, binary = inference.response(asked, *about, rows * [answers])
        most = inference.empty_bytes(asked, *about) + model.answer_bytes(rows, False)
        assert len(json.dumps(whole)) + len(binary) <= most


def test_the_header_is_the_one_of_the_extension():
    assert JSON_BYTES.decode().title() == "Inference-Header-Content-Length"
