import torch

from feddip_core import communication


def test_a_packed_model_holds_the_mask_and_the_kept_values_alone():
    w = {"layer": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "bias": torch.tensor([0.5])}
    m = {"layer": torch.tensor([[True, False, False], [False, False, True]])}
    file = communication.pack(w, m)
    assert len(file) < 13 + 300  # one byte of mask, three numbers, and a header
    back = communication.unpack(file, {k: v.shape for k, v in w.items()}, m)
    assert back["layer"].tolist() == [[1, 0, 0], [0, 0, 6]]
    assert back["bias"].tolist() == [0.5]


def test_a_file_grows_as_the_count_says():
    w = {"layer": torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))}
    sizes = {}
    for kept in (1000, 5000):
        m = {"layer": (torch.arange(10_000) < kept).view(1000, 10)}
        counted = communication.payload_bits(m, parameters=10_000) + communication.mask_bits(m)
        sizes[kept] = len(communication.pack(w, m)) - counted / 8
    assert abs(sizes[1000] - sizes[5000]) <= 8 and 0 < sizes[1000] < 300
