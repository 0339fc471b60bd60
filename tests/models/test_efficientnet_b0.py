from __future__ import annotations

import urllib.error

import pytest
import torch

from vfl.core import seeds
from vfl.core.errors import MissingDataError, SpecError
from vfl.models import make_bottom

FETCH = "torchvision.models._api.load_state_dict_from_url"


@pytest.fixture(scope="module")
def published():
    from torchvision.models import efficientnet_b0  # slow to import, and only this test needs it

    with seeds.scoped(5):
        return efficientnet_b0().eval()


def test_features_are_those_of_torchvision(monkeypatch, published):
    asked = []
    monkeypatch.setattr(
        FETCH, lambda url, **given: asked.append((url, given)) or published.state_dict()
    )
    module = make_bottom("efficientnet_b0:pretrained=true").build((3, 32, 32), 1280).eval()
    pictures = torch.randn(2, 3, 32, 32, generator=seeds.generator(0, "pictures"))
    with torch.no_grad():
        want = published.avgpool(published.features(pictures)).flatten(1)
        torch.testing.assert_close(module(pictures), want)
    ((url, given),) = asked
    assert "efficientnet_b0" in url
    assert given["weights_only"]
    assert given["check_hash"]


def test_another_width_has_a_linear_layer_of_its_own():
    module = make_bottom("efficientnet_b0").build((3, 32, 32), 10)
    assert module.classifier.weight.shape == (10, 1280)


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("no route"), RuntimeError("invalid hash value")]
)
def test_weights_that_cannot_be_fetched_are_told(monkeypatch, error):
    def fail(url, **given):
        raise error

    monkeypatch.setattr(FETCH, fail)
    with pytest.raises(MissingDataError, match=r"https://download\.pytorch\.org") as caught:
        make_bottom("efficientnet_b0:pretrained=true").build((3, 32, 32), 1280)
    assert "torch.hub.get_dir()" in str(caught.value)
    assert caught.value.got == type(error).__name__


def test_nothing_is_fetched_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(FETCH, None)
    make_bottom("efficientnet_b0").build((3, 32, 32), 1280)


@pytest.mark.parametrize("shape", [(1, 32, 32), (4, 32, 32), (10,)])
def test_other_pictures_are_refused(shape):
    with pytest.raises(SpecError, match="takes pictures"):
        make_bottom("efficientnet_b0").build(shape, 1280)
