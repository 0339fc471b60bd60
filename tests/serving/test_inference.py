"""The Open Inference Protocol: fields as its specification names them, answers as `/predict`."""

import json

import pytest
from served import predicted, same

from vfl.serving import inference
from vfl.serving.inference import FormError, InferenceRequest

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


def test_metadata_and_health_have_fields_of_the_protocol(local):
    client = local()
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
    local, trained_run, inputs, more, status
):
    known = next(iter(predicted(trained_run)))
    got, told = infer(local(), *json.loads(json.dumps(inputs).replace(KNOWN, known)), **more)
    assert (got, type(told["error"])) == (status, str)
    assert "x" * 257 not in told["error"]


@pytest.mark.parametrize("path", ["/v2/models/other/infer", "/v2/models/label/versions/1/infer"])
def test_another_model_or_version_is_told_by_name(local, path):
    status, told = infer(local(), tensor("ids", [KNOWN]), path=path)
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
    told = inference.response(asked, "label", "run", ("no", "yes"), rows)
    cells = {each["name"]: each["data"] for each in told["outputs"]}
    assert cells["missing"] == ["bank,shop", ""]
    assert [json.loads(each or "{}") for each in cells["remarks"]] == [{}, {"points": 7}]
    assert cells["prediction"] == ["no", "yes"]
    assert json.loads(json.dumps(told)) == told


def test_a_body_that_is_no_json_is_not_repeated():
    with pytest.raises(FormError) as caught:
        InferenceRequest.read(b"secret{")
    assert "secret" not in str(caught.value)
