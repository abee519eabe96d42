"""The API page of the gallery, made from signatures, docstrings and settings: nothing on it is typed by hand."""

import inspect
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import feddip_core

from ..experiment import COMMON, Experiment, is_hook, settings_of
from ..method import METHODS
from ..presets import TABLE_II
from ..settings import Setting


def page() -> str:
    """The whole page: public names first, then the settings of every experiment and of every method."""
    names = [name for name in feddip_core.__all__ if callable(getattr(feddip_core, name))]
    contents = "".join(f'<li><a href="#{name}"><code>{name}</code></a></li>' for name in sorted(names, key=str.lower))
    return (
        "<h1>API</h1><p>What <code>from feddip_core import …</code> offers, and every setting of an experiment. "
        f'This page is made from the code.</p><ul class="names">{contents}'
        '<li><a href="#settings">settings</a></li><li><a href="#methods">settings of each method</a></li></ul>'
        + "".join(entry(name, getattr(feddip_core, name)) for name in names)
        + settings()
    )


def entry(name: str, thing: Any) -> str:
    """A public function or class: its signature, its docstring and its public members."""
    members = [part for k, v in vars(thing).items() if (part := member(name, k, v))] if inspect.isclass(thing) else []
    call = f"<pre><code>{signature(name, thing)}</code></pre>"
    return f'<section id="{name}"><h2><code>{name}</code></h2>{call}{paragraphs(thing)}{"".join(members)}</section>'


def member(owner: str, name: str, thing: Any) -> str:
    """A public method or property of a class; empty if it is neither, or has nothing to say."""
    prop = isinstance(thing, property) or hasattr(thing, "attrname")
    function = getattr(thing, "fget", None) or getattr(thing, "func", None) or getattr(thing, "__func__", thing)
    if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
        return ""
    call = escape(name) if prop else signature(name, function)
    return f'<h3 id="{owner}.{name}"><code>.{call}</code></h3>{paragraphs(function)}'


def signature(name: str, thing: Any) -> str:
    """How it is called, without types: the text names them."""
    call = inspect.signature(thing)
    plain = [p.replace(annotation=p.empty) for p in call.parameters.values() if p.name not in ("self", "cls")]
    call = call.replace(parameters=plain, return_annotation=call.empty)
    return escape(name + str(call))


def paragraphs(thing: Any) -> str:
    """Its docstring; what stands between backticks is code."""
    text = escape(inspect.getdoc(thing) or "").split("`")
    text = "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(text))
    return "".join(f"<p>{part}</p>" for part in text.split("\n\n"))


def settings() -> str:
    """Tables of settings: those of every experiment, then each method's own."""
    paper = {dataset: Experiment.preset("paper", dataset) for dataset in TABLE_II}
    methods = {name: cls for name, cls in METHODS.items() if not is_hook(name)}
    own = {name: {k: s for k, s in settings_of(name).items() if k not in COMMON} for name in methods}
    tables = [
        f'<h3 id="method-{name}"><code>method="{name}"</code>: {escape(cls.label)}</h3>{paragraphs(cls)}'
        + (table(own[name], _defaults(name, own[name])) if own[name] else "<p>No settings of its own.</p>")
        for name, cls in methods.items()
    ]
    return (
        '<section id="settings"><h2>Settings of every experiment</h2><p>Give them by name to <code>Experiment</code>, '
        "<code>Experiment.preset</code>, <code>--set</code>, Papermill or Flower. Several defaults depend on the data "
        f"set: they stand in the order {', '.join(TABLE_II)}.</p>"
        + table(COMMON, {k: [getattr(exp, k) for exp in paper.values()] for k in COMMON})
        + f'</section><section id="methods"><h2>Settings of each method</h2>{"".join(tables)}</section>'
    )


def _defaults(method: str, names: Iterable[str]) -> dict[str, list]:
    """The values of Table II, for each of its data sets."""
    paper = [Experiment.preset("paper", dataset, method=method) for dataset in TABLE_II]
    return {k: [getattr(exp, k) for exp in paper] for k in names}


def table(known: Mapping[str, Setting], defaults: Mapping[str, list]) -> str:
    """A row per setting: its name, its default, what is allowed, what it is for."""
    head = "".join(f'<th scope="col">{word}</th>' for word in ("setting", "default", "allowed", "what it is for"))
    rows = "".join(
        f'<tr><th scope="row"><code>{k}</code></th><td>{escape(_shown(defaults[k]))}</td>'
        f"<td>{escape(s.allowed)}</td><td>{escape(s.note)}</td></tr>"
        for k, s in known.items()
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _shown(values: list) -> str:
    """One value if the data sets agree, else all of them."""
    words = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return words[0] if len(set(words)) == 1 else " / ".join(words)
