// A menu of actions at a button: arrow keys move, Escape or a click elsewhere closes it and gives the focus back.
import { el } from "./core.js";

export class Menu {
  #element; #button = null;

  /** root: what the menu is part of; it is drawn above everything. */
  constructor(root) {
    this.#element = el("div", { class: "fs-menu", role: "menu", popover: "auto", on: {
      keydown: (event) => this.#key(event),
      toggle: (event) => { if (event.newState === "closed") this.#closed(); },
    } });
    root.append(this.#element);
  }

  /** actions: [[words, what to do], ...] */
  open(button, actions) {
    this.#button = button;
    this.#element.setAttribute("aria-label", button.getAttribute("aria-label"));
    this.#element.replaceChildren(...actions.map(([words, act]) => el("button", { type: "button", role: "menuitem", text: words,
      on: { click: () => { this.#element.hidePopover(); act(); } } })));
    this.#element.showPopover();
    this.#place(button);
    button.setAttribute("aria-expanded", true);
    this.#element.firstElementChild.focus();
  }

  /** Below the button, or above it where there is no room. */
  #place(button) {
    const at = button.getBoundingClientRect(), size = this.#element.getBoundingClientRect();
    const top = at.bottom + size.height < innerHeight ? at.bottom : Math.max(4, at.top - size.height);
    const left = Math.max(4, Math.min(at.left, innerWidth - size.width - 4));
    Object.assign(this.#element.style, { top: `${top}px`, left: `${left}px` });
  }

  #closed() {
    this.#button?.setAttribute("aria-expanded", false);
    if (this.#element.contains(document.activeElement) || document.activeElement === document.body) this.#button?.focus();
  }

  #key(event) {
    const items = [...this.#element.children];
    const at = items.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === "Escape") event.stopPropagation(); // it closes the menu and stops no answer
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    items[(next + items.length) % items.length].focus();
  }
}
