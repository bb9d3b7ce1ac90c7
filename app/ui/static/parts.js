// Small parts that several rooms of the page are made of.
import { el, setText } from "./core.js";

let lastId = 0;

/** An id that nothing else of the page has. */
export function freshId(stem) {
  lastId += 1;
  return `fs-${stem}-${lastId}`;
}

/** A button that can be pressed once at a time; what its work refuses is told in `alert`. While it works it is not
 *  disabled, which would take the focus away from who uses the keyboard. */
export function button(text, work, { alert = null, kind = "", label = null, disabled = false, title = null } = {}) {
  const made = el("button", { type: "button", class: `fr-button ${kind}`, text, "aria-label": label, disabled, title });
  made.addEventListener("click", async () => {
    if (made.ariaBusy) return;
    made.ariaBusy = "true";
    alert?.clear();
    try {
      await work();
    } catch (error) {
      if (alert === null) throw error;
      alert.say(error.message);
    } finally {
      made.ariaBusy = null;
    }
  });
  return made;
}

/** What takes an admin key; `allow` says who has one. Returns the elements. */
export function forAdmins(...elements) {
  for (const element of elements) element.dataset.admin = "";
  return elements;
}

/** Turns all of these within `root` on, or off with the reason as their title. */
export function allow(root, isAdmin, reason) {
  for (const element of root.querySelectorAll("[data-admin]")) {
    element.disabled = !isAdmin;
    element.title = isAdmin ? "" : reason;
  }
}

/** Buttons for what cannot be undone: it is asked once more in place, so that nothing goes by one slip. `words`: first,
 *  sure() as it is then, keep; `label` tells screen readers what the first is of. */
export function askedTwice({ first, sure, keep, label = null }, work, alert) {
  const begin = el("button", { type: "button", class: "fr-button danger", text: first, "aria-label": label });
  const go = button("", work, { alert, kind: "danger" });
  const back = el("button", { type: "button", class: "fr-button", text: keep });
  const show = (isAsking) => {
    if (isAsking) setText(go, sure());
    [go.hidden, back.hidden, begin.hidden] = [!isAsking, !isAsking, isAsking];
  };
  show(false);
  for (const [pressed, isAsking] of [[begin, true], [go, false], [back, false]]) {
    pressed.addEventListener("click", () => {
      show(isAsking);
      (isAsking ? back : begin).focus();
    });
  }
  return [begin, go, back];
}

/** A line that screen readers read out when it changes. `element` goes into the page. */
export class Alert {
  constructor() {
    this.element = el("p", { class: "fr-said", role: "status" });
    this.clear();
  }

  say(text, kind = "error") {
    setText(this.element, text);
    this.element.dataset.kind = kind;
    this.element.hidden = false;
  }

  clear() {
    setText(this.element, "");
    this.element.hidden = true;
  }
}

export function badge(text, kind = "", title = null) {
  return el("span", { class: "fr-badge", data: { kind }, text, title });
}

/** A field with its label. `input` is an element of a form. */
export function field(label, input, hint = null) {
  input.id ||= freshId("field");
  const told = hint === null ? null : el("small", { id: `${input.id}-hint`, text: hint });
  if (told) input.setAttribute("aria-describedby", told.id);
  return el("div", { class: "fr-field" }, el("label", { for: input.id, text: label }), input, told);
}

/** options: pairs of value and text. */
export function select(options, chosen, attributes = {}) {
  const made = el("select", attributes);
  for (const [value, text] of options) made.append(el("option", { value, text, selected: value === chosen }));
  return made;
}

export function progress(share, label) {
  const made = el("progress", { class: "fr-bar", max: 1, "aria-label": label });
  if (share !== null) made.value = share;
  return made;
}

/** A bar of parts: [{name, size, text}], with a legend below. What is 0 is left out. */
export function stackedBar(parts, label) {
  const whole = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  const shown = parts.filter((part) => part.size > 0);
  const bar = el("div", { class: "fr-stack", role: "img", "aria-label": label });
  const legend = el("ul", { class: "fr-legend" });
  for (const { name, size, text } of shown) {
    const piece = el("span", { data: { part: name }, title: text });
    piece.style.flexGrow = size / whole;
    bar.append(piece);
    legend.append(el("li", {}, el("span", { class: "fr-dotted", data: { part: name } }), text));
  }
  return el("div", {}, bar, legend);
}

/** Copies `text()`; says so for a moment. */
export function copyButton(text, words) {
  const made = el("button", { type: "button", class: "fr-button small", text: words.copy });
  made.addEventListener("click", async () => {
    setText(made, (await copied(text())) ? words.copied : words.failed);
    setTimeout(() => setText(made, words.copy), 1500);
  });
  return made;
}

/** Over plain HTTP from another machine a browser has no clipboard for us; then the old way. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "fr-offstage" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}
