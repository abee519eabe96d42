"""Data and a network of your own, in two functions: ten hospitals with a table of patients each, which none may show.

An experiment runs on them with dataset="feddip_core.lab.hospitals:samples", model="feddip_core.lab.hospitals:network"
and partition="given", in one process or on Flower. Copy this file, and put your own loader where the numbers are drawn.
A function reads what is on its machine, so the same name gives other data at every hospital. On Flower each client
calls only samples(its number), and the server only samples(None).
"""

import torch
from torch import Tensor, nn

from ..streams import stream

FEATURES, DISEASES, PATIENTS, TEST_PATIENTS = 20, 3, 120, 600


def samples(client: int | None) -> tuple[Tensor, Tensor]:
    """A hospital's patients, one row of measurements and one disease each; for None, those that the server tests on."""
    here = 0 if client is None else client + 1
    count = TEST_PATIENTS if client is None else PATIENTS + 10 * client  # no two hospitals have the same size
    centres = torch.randn(DISEASES, FEATURES, generator=stream(0, "hospitals"))
    draws = stream(0, "patients", n=here)
    # Toy numbers: a disease moves all measurements, and every hospital has its own mix of diseases and its own scales.
    mix = torch.ones(DISEASES) if client is None else torch.rand(DISEASES, generator=draws) + 0.1
    disease = torch.multinomial(mix, count, replacement=True, generator=draws)
    scale = 1 if client is None else 1 + 0.2 * torch.randn(FEATURES, generator=draws)
    return (centres[disease] + 2 * torch.randn(count, FEATURES, generator=draws)) * scale, disease


def network() -> nn.Module:
    """Its linear layers are pruned; the last has one output per class."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, DISEASES))
