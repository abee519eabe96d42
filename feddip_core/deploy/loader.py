import json

import torch
from safetensors import safe_open

OPERATIONS = ("conv2d", "linear", "batch_norm", "relu", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
OPERATIONS = {k: getattr(torch.nn.functional, k) for k in OPERATIONS} | {"add": torch.add, "flatten": torch.flatten}


def load(path):  # what the file says of the model, and its parameters by name
    tensors, start = {}, {"values": 0, "positions": 0, "rest": 0}
    with safe_open(path, "pt") as file:
        about, parts = json.loads(file.metadata()["model"]), {k: file.get_tensor(k) for k in start}
    for name, (part, shape, kept, width, size) in about["tensors"].items():
        tensors[name] = parts[part][start[part] : start[part] + kept].float()
        if width:  # not every weight is kept; positions end with one beyond the last weight
            at = positions(parts["positions"][start["positions"] :][:size], width, torch.Size(shape).numel())
            if len(at) != kept + 1 or at[-1] != torch.Size(shape).numel():
                raise ValueError(f"{name}: its positions do not match its shape and its {kept} values")
            tensors[name] = torch.zeros(at[-1]).index_put_((at[:-1],), tensors[name])
        tensors[name] = tensors[name].view(shape)
        start[part], start["positions"] = start[part] + kept, start["positions"] + size
    return about, tensors


def positions(code, width, count):  # gaps of `width` bits each; all bits set: a step to no kept weight
    bits = ((code[:, None] >> torch.arange(7, -1, -1)) & 1).flatten()
    gaps = bits[: len(bits) // width * width].view(-1, width).long() @ (2 ** torch.arange(width - 1, -1, -1))
    at = (gaps + (gaps < 2**width - 1)).cumsum(0) - 1
    return at[(gaps < 2**width - 1) & (at <= count)]


def classify(about, tensors, x):  # the logits of raw samples
    scale, mean, std = (torch.tensor(about["samples"][k]) for k in ("scale", "mean", "std"))
    values = [(x.float() / scale - mean) / std]
    for name, of, names, options in about["steps"]:
        values.append(OPERATIONS[name](*(values[i] for i in of), *(tensors.get(k) for k in names), **options))
    return values[-1]
