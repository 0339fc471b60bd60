"""Every registered codec, and one from outside the package, is under contract."""

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch

from vfl.compression import CODECS, make
from vfl.compression.packed import PackedCodec
from vfl.core.registry import parse
from vfl.testing import CodecContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_codec.py"


class TestRegisteredCodecs(CodecContract):
    specs = (
        "none",
        "topk:k=1",
        "topk:k=3,values=1",
        "topk:k=3,values=8,packer=index",
        "topk:k=12,values=4",
        "topk:k=3,values=bf16,packer=bitmap,grad=bf16",
        "topk:k=3,values=4,packer=range,grad=4",
        "topk:k=12,values=1,packer=range,scale=row,grad=2",
        "topk:k=3,values=4,packer=range,scale=agreed",
        "randtopk:k=3,values=8,packer=range,grad=8",
        "quantise",
        "quantise:values=1,scale=row,grad=4",
        "quantise:values=3,packer=range,grad=bf16",
        "quantise:values=bf16",
        "quantise:values=4,scale=row,outliers=2,grad=4",
        "quantise:values=3,packer=range,outliers=1",
        "relu",
        "relu:values=fp32,packer=bitmap",
        "relu:values=2,packer=bitmap,scale=row,grad=4",
        "relu:values=4,scale=agreed",
        "relu:values=4,packer=enumerative",
        "relu:values=fp32,packer=enumerative,grad=bf16",
        "l1",
        "l1:target=0,weight=0.001,packer=bitmap,grad=3",
        "l1:target=3,values=1,packer=enumerative,scale=row",
        "size:k=4",
        "size:k=12,kind=mask,values=4,grad=4",
        "sign",
        "sign:width=20,grad=4",
        "rate",
        "rate:weight=0.1,bits=2,grad=4",
        "quantise:values=3,packer=range,pad=no",
        "relu:pad=no",
        "randtopk:k=3,values=8,packer=range,scale=agreed,pad=always",
        "quantise:values=3,packer=range,pad=always",
        "relu:grad=4,pad=always",
        "rate:pad=always",
        "randtopk:k=3",
        "randtopk:k=3,alpha=0.5,law=multinomial,values=8",
        "randtopk:k=11,alpha=1,values=5,packer=index",
        "randtopk:k=12,alpha=1,law=multinomial",
        "error_feedback:k=1",
        "error_feedback:k=12,values=4,packer=bitmap,scale=row,grad=4",
        "aqsgd",
        "aqsgd:values=1,scale=row,grad=fp32",
        "c3sl:rows=2",
        "c3sl:rows=5,values=4,grad=4,keys=unitary",
        "splitfc",
        "splitfc:keep=1,bits=1,grad=2",
        "bottlenet:k=4",
        "bottlenet:k=12,psnr=5,values=fp32,grad=4",
        "fedlite:pieces=4,clusters=3",
        "fedlite:pieces=12,clusters=2,correction=0,grad=4",
    )

    def test_every_registered_name_is_here(self):
        assert {parse(spec)[0] for spec in self.specs} == set(CODECS.names())


class TestNarrowCut(CodecContract):
    specs = (
        "none",
        "topk:k=1,packer=index",
        "topk:k=1,values=8",
        "randtopk:k=1,alpha=1",
        "relu:packer=enumerative",
    )
    width = 1


class TestManyLimbs(CodecContract):
    specs = ("topk:k=14,values=4", "randtopk:k=14", "relu:packer=enumerative")
    width = 600


class TestOutsideCodec(CodecContract):
    specs = ("half",)

    @pytest.fixture(autouse=True)
    def _registered_for_one_test(self, monkeypatch):
        monkeypatch.setattr(CODECS, "_members", dict(CODECS._members))
        run_path(str(EXAMPLE))

    def test_half_precision_rounds_to_eleven_bits(self):
        cut = torch.tensor([[1 + 2**-10, 1 + 2**-12, 1e6]])
        decoded = make("half").decode(make("half").encode(cut).payload, 1, 3).cut
        assert decoded.tolist() == [[1 + 2**-10, 1.0, 65504.0]]


def test_the_contract_finds_queries_whose_lengths_differ(monkeypatch):
    monkeypatch.setattr(PackedCodec, "equal_queries", lambda codec, width: True)
    contract = TestRegisteredCodecs()
    for spec in ("topk:k=3,values=4,packer=range,pad=no", "relu:packer=bitmap,pad=no"):
        with pytest.raises(AssertionError, match="the length of a query discloses"):
            contract.test_query_length_discloses_only_its_shape(spec)


def test_naming_the_contracts_loads_no_torch():
    script = "import sys, vfl.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
