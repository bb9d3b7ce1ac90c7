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

/** The last values of something, the newest at the right edge; `from` and `to` name both ends of the time. `top` of the
 *  plot, called by `name(top)`: left out, a round number above the largest. */
export function line(label, values, { capacity, from, to, name, top = above(Math.max(...values, 0)) }) {
  const plot = canvas(label);
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
  return el("div", {},
    el("div", { class: "fr-axis", text: name(top) }), plot,
    el("div", { class: "fr-axis" }, el("span", { text: from }), el("span", { text: to })));
}

/** The next of 1, 2, 5, 10, 20, ... */
function above(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

/** counts: [[upper bound, count]], the bounds called by `name(bound)`, the highest bar's count by `number(count)`. Empty
 *  bounds at both ends are left out. */
export function histogram(label, counts, name, number) {
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
  return el("div", {}, el("div", { class: "fr-axis", text: number(most) }), list);
}

/** About the value below which a share of all counts lies, as if those between two bounds lay evenly (so does Prometheus);
 *  null where there are none, Infinity beyond the last bound. */
export function quantile(counts, share) {
  const wanted = share * counts.reduce((sum, [, count]) => sum + count, 0);
  let below = 0, from = 0;
  for (const [bound, count] of counts) {
    if (count > 0 && below + count >= wanted) return bound === null ? Infinity : from + (bound - from) * (wanted - below) / count;
    below += count;
    from = bound;
  }
  return null;
}
