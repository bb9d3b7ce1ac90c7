// What is told below the list of chats: what was done, each with its own way back, and what was refused.
import { el, t } from "./core.js";

const SHOWN_MS = 12_000; // that a line, and the "Undo" in it, stays; the server keeps what was deleted for some minutes

export class Told {
  /** focusAfter(): where the focus goes when a line that has it is taken away. */
  constructor(focusAfter) {
    this.element = el("div", { class: "fs-chats-told", role: "status" });
    this.focusAfter = focusAfter;
  }

  /** For a while, below what was told before. Gives the line. */
  tell(words, ...more) {
    const line = this.#add(el("p", {}, words, " ", ...more));
    setTimeout(() => {
      if (line.contains(document.activeElement)) this.focusAfter();
      line.remove();
    }, SHOWN_MS);
    return line;
  }

  /** Until it is dismissed, or something else is refused. */
  alert(words) {
    const close = el("button", { type: "button", class: "fs-icon", text: "×", "aria-label": t("chats.dismiss"), on: { click: () => line.remove() } });
    const line = el("div", { class: "fs-error", role: "alert" }, el("span", { text: words }), close);
    this.element.querySelector(".fs-error")?.remove();
    this.#add(line);
  }

  #add(line) {
    this.element.append(line);
    line.scrollIntoView({ block: "nearest" });
    return line;
  }
}
