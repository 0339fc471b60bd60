"""Membership scores against closed forms."""

import torch
from torch.nn.functional import softmax

from vfl.attacks.membership.likelihood_ratio import scaled_confidence
from vfl.core.seeds import generator


def test_scaled_confidence_is_a_log_of_odds():
    draw = generator(0, "confidence")
    outputs, labels = torch.randn(20, 5, generator=draw).double(), torch.arange(20) % 5
    p = softmax(outputs, 1)[torch.arange(20), labels]
    assert torch.allclose(scaled_confidence(outputs, labels), (p / (1 - p)).log())


def test_a_sure_prediction_stays_finite():
    outputs = torch.tensor([[200.0, 0.0], [0.0, 200.0]])
    assert scaled_confidence(outputs, torch.tensor([0, 0])).tolist() == [200, -200]
