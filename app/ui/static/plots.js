// Two plots drawn as SVG: a line over time, and a histogram. Their numbers are told in words too.
import { el } from "./core.js";

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 320, HEIGHT = 90;

function svg(tag, attributes) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function canvas(label) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "fr-plot" });
}

/** The last values of something, the newest at the right edge. `most`: the top of the plot; null takes the largest. */
export function line(label, values, capacity, most = null) {
  const plot = canvas(label);
  const top = most ?? Math.max(...values, 1e-9) * 1.1;
  const points = values.map((value, at) => {
    const x = WIDTH * (1 - (values.length - 1 - at) / (capacity - 1));
    return `${x.toFixed(1)},${(HEIGHT * (1 - Math.min(value / top, 1))).toFixed(1)}`;
  });
  if (points.length > 1) {
    const first = points[0].split(",")[0];
    plot.append(
      svg("polygon", { points: `${first},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`, class: "fr-area" }),
      svg("polyline", { points: points.join(" "), class: "fr-line" }),
    );
  }
  return plot;
}

/** counts: [[upper bound, count]], the bounds named by `name(bound)`. Empty bounds at both ends are left out. */
export function histogram(label, counts, name) {
  const filled = counts.map(([, count]) => count > 0);
  const from = Math.max(filled.indexOf(true) - 1, 0), to = Math.min(filled.lastIndexOf(true) + 2, counts.length);
  const shown = counts.slice(from, to);
  const most = Math.max(...shown.map(([, count]) => count), 1);
  const list = el("ol", { class: "fr-histogram", "aria-label": label });
  for (const [bound, count] of shown) {
    const bar = el("span", { class: "fr-column", "aria-hidden": "true" });
    bar.style.height = `${(100 * count) / most}%`;
    list.append(el("li", { title: `${name(bound)}: ${count}` }, bar, el("span", { class: "fr-bound", text: name(bound) }), el("span", { class: "fr-offscreen", text: String(count) })));
  }
  return list;
}

/** The value below which a share of all counts lies, as far as bounds tell; null where there are none. */
export function quantile(counts, share) {
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  let below = 0;
  for (const [bound, count] of counts) {
    below += count;
    if (all && below >= all * share) return bound ?? Infinity;
  }
  return null;
}
