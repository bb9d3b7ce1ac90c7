// Two answers side by side: what the second one is made by, chosen beside the message box for the next message.
import { ask, el, t } from "./core.js";
import { button } from "./messages.js";
import { readPresets } from "./presets.js";

export class Compare {
  #model; #settings; #temperature;
  #presets = new Map();

  constructor() {
    this.button = button("chat.compare", () => this.#toggle());
    this.button.setAttribute("aria-expanded", false);
    this.#model = el("select", { "aria-label": t("chat.compare_model") });
    this.#settings = el("select", { "aria-label": t("chat.compare_settings") });
    this.#temperature = el("input", { type: "number", min: "0", max: "2", step: "0.1", "aria-label": t("chat.compare_temperature"),
      placeholder: t("chat.compare_temperature") });
    this.#draw([]);
    this.element = el("fieldset", { class: "fs-compare", hidden: true },
      el("legend", { text: t("chat.compare_title") }), el("p", { text: t("chat.compare_note") }),
      this.#model, this.#settings, this.#temperature);
  }

  /** The ways in which the next message is answered: one, or two. */
  ways() {
    if (this.element.hidden) return [{}];
    const { name, system, sampling } = this.#presets.get(this.#settings.value) ?? {};
    return [{}, {
      model_id: this.#model.value,
      preset: name ? { name, system, sampling } : null,
      sampling: this.#temperature.value === "" ? {} : { temperature: Number(this.#temperature.value) },
    }];
  }

  clear() {
    this.element.hidden = true;
    this.button.setAttribute("aria-expanded", false);
  }

  async #toggle() {
    this.element.hidden = !this.element.hidden;
    this.button.setAttribute("aria-expanded", !this.element.hidden);
    if (this.element.hidden) return;
    const [shelf, presets] = await Promise.all([ask("ui/models/shelf"), readPresets()]).catch(() => [{ models: [] }, []]);
    this.#presets = new Map(presets.map((preset) => [`${preset.isBuiltIn ? "" : "own "}${preset.name}`, preset]));
    this.#draw(shelf.models.filter((model) => model.state === "ready").map((model) => model.id));
  }

  /** ids: of the models that lie here. What was chosen stays, as long as it is there. */
  #draw(ids) {
    fill(this.#model, [["", t("chat.compare_same")], ...ids.map((id) => [id, id])]);
    fill(this.#settings, [["", t("chat.compare_same_settings")], ...[...this.#presets].map(([key, { name }]) => [key, name])]);
  }
}

/** options: [[value, words], ...], the first taken where what was chosen is gone. */
function fill(select, options) {
  const chosen = options.some(([value]) => value === select.value) ? select.value : options[0][0];
  select.replaceChildren(...options.map(([value, words]) => el("option", { value, text: words })));
  select.value = chosen;
}
