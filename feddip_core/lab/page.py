"""The parts of a page of widgets: controls that a screen reader can name, headings, and remarks beside them.

Neither `interact` nor `widgets.Output` is used: both make Papermill hang.
"""

from html import escape

import ipywidgets as widgets

# ipywidgets gives no name to a slider's handle and the number beside it, does not say which of several buttons is
# pressed, and silently replaces a typed number that is out of range. This script mends all three, also for controls
# that are created later. It needs no network; where scripts are not allowed, nothing is lost.
NAME_SLIDERS = """
const page = this.closest('.widget-vbox');
const name = () => {
  page.querySelectorAll('.widget-slider').forEach(slider => {
    const text = slider.querySelector('label').textContent, number = slider.querySelector('.widget-readout');
    const off = String(slider.querySelector('.slider').hasAttribute('disabled'));
    for (const handle of slider.querySelectorAll('[role=slider]')) {
      handle.setAttribute('aria-label', text);
      handle.setAttribute('aria-disabled', off);
    }
    number.setAttribute('role', 'textbox');
    number.setAttribute('aria-label', text + ', as a number');
  });
  page.querySelectorAll('.widget-toggle-button').forEach(button => {
    button.setAttribute('aria-pressed', String(button.classList.contains('mod-active')));
  });
};
const settled = event => {
  const readout = event.target, slider = readout.closest?.('.widget-slider');
  if (!slider || !readout.matches('.widget-readout') || (event.type === 'keydown' && event.key !== 'Enter')) return;
  const typed = readout.textContent.trim();
  slider.querySelector('.clipped')?.remove();
  setTimeout(() => {
    const taken = readout.textContent.trim();
    if (typed === '' || Number(typed) === Number(taken)) return;
    const note = document.createElement('span');
    note.className = 'clipped';
    note.setAttribute('role', 'alert');
    note.textContent = typed + ' is out of range; it became ' + taken;
    slider.append(note);
  });
};
page.addEventListener('keydown', settled, true);
page.addEventListener('focusout', settled, true);
const watched = {childList: true, subtree: true, attributeFilter: ['disabled', 'class']};
new MutationObserver(name).observe(page, watched);
name();
"""
STYLE = """
.explorer .widget-slider { position: relative; overflow: visible; }
.explorer .clipped { position: absolute; z-index: 1; right: 0; top: 1.7em; padding: 0 .4em; line-height: 1.5;
  color: #a00000; background: #fff; border: 1px solid #a00000; }
.explorer .widget-html-content { line-height: 1.35; }
.explorer .widget-vbox .note .widget-html-content { padding: 0 0 .3em 2em; }
.explorer table { border-collapse: collapse; line-height: 1.3; }
"""
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


def control(kind: type, description: str, width: str = "100%", **how) -> widgets.Widget:
    """A control with a name; it reports a value when the user has settled on it."""
    settled = {"continuous_update": False} if "continuous_update" in kind.class_trait_names() else {}
    words = "10.5em" if width == "100%" else "9em"
    look = dict(style={"description_width": words}, layout=dict(width=width, flex="0 1 auto", margin="1px 0"))
    return kind(description=description, tooltip=description, **settled, **look, **how)


class Note(widgets.HTML):
    """A remark beside a control; while it is empty it takes no room."""

    def __init__(self) -> None:
        super().__init__(layout=dict(display="none", width="100%", margin="0"))
        self.add_class("note")
        self.observe(lambda change: setattr(self.layout, "display", "" if change.new else "none"), "value")


def named(page: widgets.Box) -> widgets.VBox:
    """The page, with an invisible picture that names its sliders, and its style."""
    script = f'<img alt="" src="{DOT}" onload="{escape(NAME_SLIDERS)}">'
    hidden = widgets.HTML(f"<style>{STYLE}</style>{script}", layout=dict(height="0", margin="0", overflow="hidden"))
    whole = widgets.VBox([page, hidden])
    whole.add_class("explorer")
    return whole


def said(text: str) -> str:
    """A remark, read aloud by a screen reader."""
    return f'<span role="status">{escape(text)}</span>' if text else ""


def wrong(error: Exception | str) -> str:
    """An error, read aloud at once."""
    return f'<span role="alert" style="color: #A00000"><b>⚠</b> {escape(str(error))}</span>'


def stale(html: str) -> str:
    """The last plan, dimmed, while the controls are not allowed."""
    words = said("Dimmed: the last settings that were allowed.")
    return f'{words}<div style="opacity: 0.35">{html}</div>'
