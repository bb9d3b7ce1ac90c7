// Two answers side by side: what the second one is made by, chosen beside the message box for the next message.
import { ask, el, t } from "./core.js";
import { button } from "./messages.js";

export class Compare {
  #model; #temperature;

  constructor() {
    this.button = button("chat.compare", () => this.#toggle());
    this.button.setAttribute("aria-expanded", false);
    this.#model = el("select", { "aria-label": t("chat.compare_model") }, el("option", { value: "", text: t("chat.compare_same") }));
    this.#temperature = el("input", { type: "number", min: "0", max: "2", step: "0.1", "aria-label": t("chat.compare_temperature"),
      placeholder: t("chat.compare_temperature") });
    this.element = el("fieldset", { class: "fs-compare", hidden: true },
      el("legend", { text: t("chat.compare_title") }), el("p", { text: t("chat.compare_note") }), this.#model, this.#temperature);
  }

  /** The ways in which the next message is answered: one, or two. */
  ways() {
    if (this.element.hidden) return [{}];
    const sampling = this.#temperature.value === "" ? {} : { temperature: Number(this.#temperature.value) };
    return [{}, { model_id: this.#model.value, sampling }];
  }

  clear() {
    this.element.hidden = true;
    this.button.setAttribute("aria-expanded", false);
  }

  async #toggle() {
    this.element.hidden = !this.element.hidden;
    this.button.setAttribute("aria-expanded", !this.element.hidden);
    if (!this.element.hidden) await this.#listModels();
  }

  async #listModels() {
    const { models } = await ask("ui/models/shelf").catch(() => ({ models: [] }));
    const chosen = this.#model.value;
    this.#model.replaceChildren(el("option", { value: "", text: t("chat.compare_same") }),
      ...models.filter((model) => model.state === "ready").map((model) => el("option", { value: model.id, text: model.id })));
    this.#model.value = chosen;
  }
}
