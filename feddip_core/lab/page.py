"""The parts of a page of widgets: controls that a screen reader can name, headings, and remarks beside them.

Neither `interact` nor `widgets.Output` is used: both make Papermill hang.
"""

from html import escape

import ipywidgets as widgets

# ipywidgets leaves the handle of a slider and the number beside it without a name. This names them after the label,
# also when they are made anew; it needs no network, and where scripts are not allowed nothing is lost.
NAME_SLIDERS = """
const page = this.closest('.widget-vbox');
const name = () => page.querySelectorAll('.widget-slider').forEach(slider => {
  const text = slider.querySelector('label').textContent, number = slider.querySelector('.widget-readout');
  const off = String(slider.querySelector('.slider').hasAttribute('disabled'));
  for (const handle of slider.querySelectorAll('[role=slider]')) {
    handle.setAttribute('aria-label', text);
    handle.setAttribute('aria-disabled', off);
  }
  number.setAttribute('role', 'textbox');
  number.setAttribute('aria-label', text + ', as a number');
});
new MutationObserver(name).observe(page, {childList: true, subtree: true, attributeFilter: ['disabled']});
name();
"""
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


def control(kind: type, description: str, **how) -> widgets.Widget:
    """A control with a name; it reports a value when the user has settled on it."""
    settled = {"continuous_update": False} if "continuous_update" in kind.class_trait_names() else {}
    look = dict(style={"description_width": "11em"}, layout=dict(width="32em", flex="0 0 auto"))
    return kind(description=description, tooltip=description, **settled, **look, **how)


def heading(text: str) -> widgets.HTML:
    return widgets.HTML(f"<h3>{text}</h3>")


def named_sliders() -> widgets.HTML:
    """An invisible picture that names the sliders of the page it stands on."""
    return widgets.HTML(f'<img alt="" src="{DOT}" onload="{escape(NAME_SLIDERS)}">')


def said(text: str) -> str:
    """A remark, read aloud by a screen reader."""
    return f'<span role="status">{escape(text)}</span>' if text else ""


def wrong(error: Exception | str) -> str:
    """An error, read aloud at once."""
    return f'<span role="alert" style="color: #A00000"><b>⚠</b> {escape(str(error))}</span>'
