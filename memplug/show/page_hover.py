"""The text that a page shows about the rectangle under the pointer: a script, and the data that it looks up."""

from __future__ import annotations

import base64
import json

import numpy as np

from memplug.figures.figure import Rectangles

# The script searches all rectangles, which takes a millisecond for 300,000.
SCRIPT = """
const map = document.getElementById('{plot_id}'), facts = JSON.parse(document.getElementById('facts').textContent);
const array = ([type, text]) =>
  new ({Int32Array, Float64Array})[type](Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
const [lower, upper, start, nbytes] = [facts.lower, facts.upper, facts.start, facts.nbytes].map(array);
const tables = facts.words.map(([words, of]) => [words, array(of)]);
const ids = facts.numbers ? array(facts.numbers) : facts.names;
const box = document.createElement('div');
box.style.cssText = 'position:fixed;display:none;background:white;border:1px solid #999;padding:4px 8px;' +
  'font:13px sans-serif;pointer-events:none;white-space:pre;z-index:9';
document.body.appendChild(box);
map.addEventListener('mousemove', event => {
  const [x, y] = facts.axes.map(name => map._fullLayout[name]), frame = map.getBoundingClientRect();
  const across = event.clientX - frame.left - x._offset, down = event.clientY - frame.top - y._offset;
  const inside = 0 <= across && across < x._length && 0 <= down && down < y._length;
  const time = x.p2d(across), address = y.p2d(down) * facts.unit_bytes;
  const row = !inside ? -1 : lower.findIndex((from, i) =>
    from <= time && time < upper[i] && start[i] <= address && address < start[i] + nbytes[i]);
  box.style.display = row < 0 ? 'none' : 'block';
  if (row < 0) return;
  box.style.left = Math.min(event.clientX + 16, innerWidth - 360) + 'px';
  box.style.top = (event.clientY + 16) + 'px';
  const number = value => value.toLocaleString('en-US');
  const lines = [`request ${ids[row]}: ${number(nbytes[row])} bytes at ${number(start[row])}`,
    `in use from ${facts.clock} ${number(lower[row])} up to ${number(upper[row])}`];
  for (const [words, of] of tables) if (of[row] >= 0) lines.push(words[of[row]]);
  box.textContent = lines.join('\\n');
});
map.addEventListener('mouseleave', () => { box.style.display = 'none'; });
"""


def facts(drawn: Rectangles, axes: list[str], unit_bytes: int) -> str:
    """Return the script's data as an HTML element with JSON; "<" is escaped, so no text can end the element.

    Args:
        drawn: The rectangles.
        axes: Names of plotly's two axes.
        unit_bytes: Bytes of one unit along the second axis.
    """
    numbered = drawn.ids.dtype.kind == "i"
    found = {
        "axes": axes,
        "unit_bytes": unit_bytes,
        "clock": drawn.clock,
        "numbers": _packed(drawn.ids) if numbered else None,
        "names": None if numbered else drawn.ids.tolist(),
        "words": [(list(words), _packed(of)) for words, of in drawn.words],
        "lower": _packed(drawn.lower),
        "upper": _packed(drawn.upper),
        "start": _packed(drawn.start),
        "nbytes": _packed(drawn.stop - drawn.start),
    }
    return f'<script id="facts" type="application/json">{json.dumps(found).replace("<", chr(92) + "u003c")}</script>'


def _packed(values: np.ndarray) -> tuple[str, str]:
    """Return a JavaScript array type that holds the values exactly (up to 2**53), and the array's bytes in base 64."""
    small = bool((np.abs(values) < 2**31).all())
    dtype = np.int32 if small else np.float64
    text = base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
    return ("Int32Array" if small else "Float64Array", text)
