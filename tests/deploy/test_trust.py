"""A file from elsewhere is never trusted: what it says of itself must fit what it holds."""

import json
import re

import pytest
import torch
from forms import case
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from feddip_core import deploy
from feddip_core.deploy import coding, file
from feddip_core.deploy.loader import positions


@pytest.fixture(scope="module")
def packed():
    return file.pack(case("own")[0], 16)


def tensor(name, i, value):
    """Say something else of a tensor."""

    def change(about, parts):
        about["tensors"][name][i] = value(about["tensors"][name][i])

    return change


def option(step, key, value):
    def change(about, parts):
        about["steps"][step][3][key] = value

    return change


def part(name, value):
    def change(about, parts):
        parts[name] = value(parts[name])

    return change


def word(*keys, value):
    def change(about, parts):
        for key in keys[:-1]:
            about = about[key]
        about[keys[-1]] = value

    return change


LIES = {
    "a.weight: its positions do not match its shape": tensor("a.weight", 1, lambda shape: [8, *shape[1:]]),
    "out.weight: its positions do not match": tensor("out.weight", 3, lambda width: width + 1),
    "c.weight: 1,000,000,262 numbers are too many": tensor("c.weight", 1, lambda _: [10**6, 10**3, 1, 1]),
    "out.weight: 24 bytes of positions are more than": tensor("out.weight", 4, lambda _: 24),
    "a.bias: its positions do not match": tensor("a.bias", 1, lambda _: [2]),
    "b.weight: no such form": tensor("b.weight", 2, lambda _: -1),
    "b.bias: no such form": tensor("b.bias", 0, lambda _: "positions"),
    "out.weight: the file ends before its values do": part("values", lambda v: v[:-1]),
    "rest: it holds": part("rest", lambda v: torch.cat([v, v])),
    "out.bias: the file ends": part("rest", lambda v: v[:-1]),
    "values holds a number that is not finite": part("values", lambda v: v.clone().fill_(torch.nan)),
    "a.weight: its positions do not match its shape [4, 2, 3, 5] and": part("values", torch.zeros_like),
    "a.weight: its positions do not": part("positions", lambda v: v ^ 255),
    "values is torch.float32": part("values", lambda v: v.float()),
    "step 1: the operation 'eval' is not known": word("steps", 0, 0, value="eval"),
    "step 1: conv2d reads a tensor that is not there": word("steps", 0, 2, value=["x", None]),
    "step 1: conv2d reads a step that comes later": word("steps", 0, 1, value=[5]),
    "step 1: conv2d has other options": word("steps", 0, 3, value={"stride": [1, 1]}),
    "step 1: conv2d would take": option(0, "padding", [10**6, 10**6]),
    "KeyError: 8": word("bits", value=8),
    "samples: shape [1000000, 1000000]": word("samples", "shape", value=[10**6, 10**6]),
    "samples: scale and std must be positive": word("samples", "scale", value=0),
    "RuntimeError": word("samples", "shape", value=[3, 9, 13]),
    "KeyError: 'steps'": lambda about, parts: about.pop("steps"),
    "the last step does not give a row of logits": word("steps", value=[]),
}  # fmt: skip


@pytest.mark.parametrize("reason", LIES)
def test_a_file_that_lies_is_refused(packed, tmp_path, reason, monkeypatch):
    about, parts = json.loads(json.dumps(packed[0])), dict(packed[1])
    LIES[reason](about, parts)
    path = tmp_path / "model.safetensors"
    save_file(parts, path, {"model": json.dumps(about)})
    monkeypatch.setattr(torch, "zeros", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*cannot be trusted.*" + re.escape(reason)):
        deploy.load(path)


def test_a_file_that_is_cut_or_missing_is_refused(packed, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(packed[1], path, {"model": json.dumps(packed[0])})
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="it cannot be trusted"):
            deploy.load(path)
    with pytest.raises(ValueError, match="nowhere is not there"):
        deploy.load(tmp_path / "nowhere")
    save_file(packed[1], path)
    with pytest.raises(ValueError, match="it cannot be trusted; KeyError: 'model'"):
        deploy.load(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_byte_that_is_changed_gives_an_error_or_another_model_of_the_same_shape(packed, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(packed[1], path, {"model": json.dumps(packed[0])})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        _, graph = deploy.load(path)
    except ValueError as error:
        assert "cannot be trusted" in str(error)
    else:
        assert sum(v.numel() for v in graph.tensors.values()) <= file.MOST_NUMBERS and graph.outputs > 0


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["stride", "padding", "a"]), inner),
    max_leaves=4,
)


def places(value, path=()):
    """Every place in what a file says of its model."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for k, v in inner for place in places(v, (*path, k)))]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_file_that_says_anything_is_refused_or_runs(packed, data):
    about = json.loads(json.dumps(packed[0]))
    *path, last = data.draw(st.sampled_from(places(about)[1:]))
    word(*path, last, value=data.draw(ANYTHING))(about, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "MOST_NUMBERS", 10**5)
        try:
            graph = file._graph(about, packed[1])
        except Exception:  # `load` turns each of them into the same refusal
            return
        assert graph(torch.zeros(2, *graph.samples.shape)).shape == (2, graph.outputs)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.5]), min_size=1, max_size=300), st.integers(0, 3))
def test_positions_come_back_and_no_other_width_is_shorter(numbers, far):
    weight = torch.tensor(numbers + [0.0] * 10**far)
    width, code = coding.encode(weight)
    size = weight.numel()
    at = positions(torch.tensor(list(code), dtype=torch.uint8), width, size)
    assert at.tolist() == [*weight.nonzero().flatten().tolist(), size]
    assert len(code) <= -(-(size + 1) // 8)  # never longer than the mask


def test_all_kept_takes_nothing():
    assert coding.encode(torch.ones(3, 3)) == (0, b"")
