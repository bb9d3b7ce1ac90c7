// What a chat asks of its model: its system prompt and sampling, from presets or typed. Kept with the chat.
import { ask, el, Refused, setText, t } from "./core.js";
import { readPresets } from "./presets.js";

// [name, step, least, most]; an empty box leaves it to the model.
const NUMBERS = [
  ["temperature", "any", 0, 2], ["top_p", "any", 0, 1], ["top_k", 1, 0, null], ["min_p", "any", 0, 1],
  ["repetition_penalty", "any", 0.01, 10], ["presence_penalty", "any", -2, 2], ["frequency_penalty", "any", -2, 2],
  ["max_tokens", 1, 1, null], ["seed", 1, 0, null],
];
const EFFORTS = ["none", "low", "medium", "high"];

class ChatSettings {
  #chat; #presets = [];
  #chatId = null; // of the chat that the dialog was opened for; null for a new one
  #opened = null; // what was in the boxes then
  #numbers = new Map();

  constructor(tools, chat) {
    this.#chat = chat;
    this.button = el("button", { type: "button", class: "fs-quiet", id: "fs-chat-settings-button", text: t("settings_of.button"),
      "aria-haspopup": "dialog", on: { click: () => this.open() } });
    this.form = this.#build();
    this.dialog = el("dialog", { id: "fs-chat-settings", "aria-labelledby": "fs-chat-settings-title" }, this.form);
    tools.append(this.button);
    document.getElementById("fs-frame").append(this.dialog);
  }

  // -- drawing

  #build() {
    this.preset = el("select", { on: { change: () => this.#take(this.#presets[this.preset.value]) } });
    this.deletePreset = el("button", { type: "button", class: "fs-quiet", text: t("settings_of.delete_preset"), on: { click: () => this.#deletePreset() } });
    this.model = el("select");
    this.system = el("textarea", { rows: 4, placeholder: t("settings_of.system_hint") });
    this.stop = el("textarea", { rows: 2, placeholder: t("settings_of.stop_hint") });
    this.effort = el("select", {}, el("option", { value: "", text: t("settings_of.default") }),
      ...EFFORTS.map((word) => el("option", { value: word, text: t(`settings_of.effort_${word}`) })));
    this.presetName = el("input", { type: "text", maxlength: "80", placeholder: t("settings_of.preset_name") });
    this.told = el("p", { class: "fs-error", role: "alert", hidden: true });
    return el("form", { on: { submit: (event) => this.#submit(event) } },
      el("h2", { id: "fs-chat-settings-title", text: t("settings_of.title") }),
      el("div", { class: "fs-line" }, labelled("settings_of.preset", this.preset), this.deletePreset),
      labelled("settings_of.model", this.model),
      labelled("settings_of.system", this.system),
      el("div", { class: "fs-grid" }, ...NUMBERS.map((row) => this.#numberBox(...row)), labelled("settings_of.effort", this.effort)),
      labelled("settings_of.stop", this.stop),
      el("div", { class: "fs-line" }, labelled("settings_of.save_as", this.presetName),
        el("button", { type: "button", class: "fs-quiet", text: t("settings_of.save_preset"), on: { click: () => this.#savePreset() } })),
      this.told,
      el("div", { class: "fs-line fs-end" },
        el("button", { type: "button", class: "fs-quiet", text: t("settings_of.cancel"), on: { click: () => this.dialog.close() } }),
        el("button", { type: "submit", class: "fs-send", text: t("settings_of.save") })));
  }

  #numberBox(name, step, least, most) {
    const box = el("input", { type: "number", step: String(step), min: String(least), max: most === null ? null : String(most),
      inputmode: "decimal", placeholder: t("settings_of.default"), name });
    this.#numbers.set(name, box);
    return labelled(`settings_of.${name}`, box);
  }

  // -- opening and saving

  async open() {
    this.#tell("");
    const [chatId, visit] = [this.#chat.current(), this.#chat.visit];
    try {
      await this.#readPresets();
      const chat = chatId ? await ask(`ui/chats/${chatId}`) : { system: "", sampling: {}, model_id: "" };
      await this.#listModels(chat.model_id);
      this.#take(chat);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return this.#chat.composer.tell(error.message); // another chat's settings stand in the form
    }
    if (visit !== this.#chat.visit) return;
    this.#chatId = chatId;
    this.#opened = this.#given();
    this.presetName.value = "";
    this.dialog.showModal();
  }

  async #submit(event) {
    event.preventDefault();
    const [chatId, opened, given] = [this.#chatId, this.#opened, this.#given()];
    if (!chatId && isSame(opened, given)) return this.dialog.close(); // nothing is no reason for a chat
    const kept = await this.#try(async () => chatId
      ? ask(`ui/chats/${chatId}`, { body: changed(opened, given, await ask(`ui/chats/${chatId}`)) })
      : ask("ui/chats", { body: { ...given, is_incognito: this.#chat.isIncognito } }));
    if (!kept) return;
    this.dialog.close();
    if (!chatId) await this.#chat.begun(kept.id);
  }

  /** Those that lie here, and the chosen one wherever it is. */
  async #listModels(chosen) {
    const { models } = await ask("ui/models/shelf");
    const ids = new Set(models.filter((model) => model.state === "ready" || model.is_embedded).map((model) => model.id));
    if (chosen) ids.add(chosen);
    this.model.replaceChildren(el("option", { value: "", text: t("settings_of.model_in_hand") }),
      ...[...ids].map((id) => el("option", { value: id, text: id })));
    this.model.value = chosen;
  }

  /** Fill the boxes in. */
  #take({ system, sampling }) {
    this.system.value = system ?? "";
    for (const [name, box] of this.#numbers) box.value = sampling[name] ?? "";
    this.effort.value = sampling.reasoning_effort ?? "";
    this.stop.value = (sampling.stop ?? []).map((words) => words.replaceAll("\\", "\\\\").replaceAll("\n", "\\n")).join("\n");
  }

  /** What is in the boxes, as the server takes it. */
  #given() {
    const numbers = [...this.#numbers].filter(([, box]) => box.value !== "").map(([name, box]) => [name, box.valueAsNumber]);
    const stop = this.stop.value.split("\n").filter(Boolean).map((line) => line.replace(/\\(n|\\)/g, (_, c) => (c === "n" ? "\n" : "\\")));
    return { system: this.system.value, model_id: this.model.value, sampling: {
      ...Object.fromEntries(numbers),
      ...(stop.length ? { stop } : {}),
      ...(this.effort.value ? { reasoning_effort: this.effort.value } : {}),
    } };
  }

  // -- presets

  async #readPresets() {
    this.#presets = await readPresets();
    this.preset.replaceChildren(el("option", { value: "", text: t("settings_of.preset_none"), disabled: true, selected: true }),
      ...this.#presets.map((preset, i) => el("option", { value: String(i), text: preset.name })));
  }

  async #savePreset() {
    const name = this.presetName.value.trim();
    if (!name) return this.#tell(t("settings_of.name_first"));
    if (!this.form.reportValidity()) return;
    await this.#try(async () => {
      const { system, sampling } = this.#given();
      await ask("ui/presets", { body: { name, system, sampling } });
      await this.#readPresets();
      this.preset.value = String(this.#presets.findIndex((preset) => !preset.isBuiltIn && preset.name === name));
      this.presetName.value = "";
    });
  }

  async #deletePreset() {
    const preset = this.#presets[this.preset.value];
    if (!preset || preset.isBuiltIn) return this.#tell(t("settings_of.choose_own"));
    await this.#try(async () => {
      await ask("ui/presets/delete", { body: { name: preset.name } });
      await this.#readPresets();
    });
  }

  #tell(words) {
    setText(this.told, words);
    this.told.hidden = !words;
  }

  async #try(work) {
    try {
      const told = await work();
      this.#tell("");
      return told;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#tell(error.message);
      return null;
    }
  }
}

/** What was changed in the boxes, on top of what the chat asks by now: another tab may have changed other ones. */
function changed(opened, given, now) {
  const one = (before, after, current) => (isSame(before, after) ? current : after);
  const names = new Set([opened, given, now].flatMap(({ sampling }) => Object.keys(sampling)));
  const sampling = [...names].map((name) => [name, one(opened.sampling[name], given.sampling[name], now.sampling[name])]);
  return {
    system: one(opened.system, given.system, now.system),
    model_id: one(opened.model_id, given.model_id, now.model_id),
    sampling: Object.fromEntries(sampling.filter(([, value]) => value !== undefined)),
  };
}

function isSame(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

function labelled(key, box) {
  return el("label", {}, el("span", { text: t(key) }), box);
}

/** tools: where the button that opens the settings goes. chat: the chat's own module (chat.js). */
export function start(tools, chat) {
  return new ChatSettings(tools, chat);
}
