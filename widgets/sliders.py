"""Controls above figures that follow them: live in a notebook, and still there where no kernel runs.

What a view displays is a widget, then its figures and sentences again as plain outputs, which follow the controls too.
Where the widget lives its stylesheet hides those; a saved notebook, an exported page or a report shows them as they
stood. JupyterLab's own plotly renderer keeps a figure that it has drawn, so the live ones are drawn by the widget.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from IPython.display import display
from plotly.offline import get_plotlyjs

from workbench.figures import style
from workbench.figures.display import MARK, bundle, spec

Drawn = tuple[Sequence[go.Figure], Sequence[str]]
_HERE = Path(__file__).parent
_LOOK = {"description_width": "initial"}


class Figures(anywidget.AnyWidget):
    """Plotly figures as plain data, with sentences below them."""

    _esm = _HERE / "sliders.js"
    _css = _HERE / "sliders.css"

    specs = traitlets.List().tag(sync=True)
    sentences = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, **values: Any):
        super().__init__(**values)
        self.on_msg(self._hear)

    def _hear(self, _: Any, content: Mapping[str, Any], buffers: Any) -> None:
        if content.get("request") == "plotly":
            self.send({"library": "plotly"}, [get_plotlyjs().encode()])


class View:
    """Controls above figures and sentences that follow them.

    controls: ipywidgets by name; draw: their values by name -> figures and sentences. `figures` and `sentences` are
    what is shown now; setting `view.controls["gamma"].value` draws anew, as moving the slider does. `widget` is the
    live part alone, to put into another layout.
    """

    def __init__(self, controls: Mapping[str, ipywidgets.ValueWidget], draw: Callable[..., Drawn]):
        self.controls, self._draw = dict(controls), draw
        self._start, self._shown, self._held = self.values, [], False
        self.figures, self.sentences = draw(**self.values)
        self._live = Figures(specs=list(map(spec, self.figures)), sentences=list(self.sentences))
        again = ipywidgets.Button(description="as at first", icon="undo", layout={"width": "110px"})
        again.on_click(lambda _: self.reset())
        row = ipywidgets.Layout(flex_flow="row wrap", align_items="center", max_width=f"{style.WIDTH}px")
        self.widget = ipywidgets.VBox([ipywidgets.Box([*self.controls.values(), again], layout=row), self._live])
        for control in self.controls.values():
            control.observe(self._changed, "value")

    def __repr__(self) -> str:
        return f"View({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    def reset(self) -> None:
        """Put the controls back where they started and draw once."""
        self._held = True
        try:
            for name, value in self._start.items():
                self.controls[name].value = value
        finally:
            self._held = False
        self._changed()

    def _changed(self, _: Any = None) -> None:
        if self._held:
            return
        self.figures, self.sentences = self._draw(**self.values)
        with self._live.hold_sync():
            self._live.sentences = list(self.sentences)
            self._live.specs = list(map(spec, self.figures))
        for handles in self._shown:
            for handle, output in zip(handles, self._outputs(), strict=True):
                handle.update(output, raw=True)

    def _outputs(self) -> list[dict[str, Any]]:
        return [*map(bundle, self.figures), words(self.sentences)]

    def _ipython_display_(self) -> None:
        live = self.widget._repr_mimebundle_()
        named = ", ".join(control.description for control in self.controls.values())
        display(live | words([f"Run this cell in a notebook to move {named}; below, as they stood."]), raw=True)
        self._shown.append([display(output, raw=True, display_id=True) for output in self._outputs()])


def slider(name: str, value: float, low: float, high: float, step: float) -> ipywidgets.FloatSlider:
    return ipywidgets.FloatSlider(
        value, min=low, max=high, step=step, description=name, readout_format=".2f", style=_LOOK
    )


def choice(name: str, options: Mapping[str, Any], value: Any) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=list(options.items()), value=value, description=name, style=_LOOK)


def words(sentences: Sequence[str]) -> dict[str, Any]:
    """Plain sentences as an output, a paragraph each, all markup in them escaped."""
    body = "".join(f'<p style="max-width:{style.WIDTH}px;margin:4px 0">{html.escape(s)}</p>' for s in sentences)
    return {"text/html": f'<div {MARK}="text">{body}</div>', "text/plain": "\n".join(sentences)}
