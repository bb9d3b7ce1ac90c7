// Forms of the models' room: a model of one's own, the hub's token, what is a model's own.
import { ask, el, t } from "./core.js";
import { Alert, button, field, forAdmins, select } from "./parts.js";

const KV_DTYPES = ["", "auto", "bf16", "fp16", "fp32", "int8"];

/** A repository or a folder of the server's machine, put into the user's own models.yaml. */
export function addModelForm(deeds) {
  const alert = new Alert();
  const model = el("input", { type: "text", required: true, autocomplete: "off", spellcheck: false, placeholder: "owner/name, /models/my-model" });
  const id = el("input", { type: "text", autocomplete: "off", spellcheck: false });
  const form = el("form", { class: "fr-form" },
    field(t("add.model"), model, t("add.hint")),
    field(t("add.id"), id, t("add.id_hint")),
    ...forAdmins(el("button", { type: "submit", class: "fr-button primary", text: t("add.add") })),
    alert.element,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submitted(form, alert, async () => {
      alert.say(t("add.asking"), "info");
      const added = await deeds.add(model.value.trim(), id.value.trim() || null);
      alert.say(t("add.added", { id: added.id }), "good");
      form.reset();
      await deeds.refresh();
      deeds.show(added.id);
    });
  });
  return form;
}

/** For gated models. It is kept on the server and never shown again. */
export function tokenForm() {
  const alert = new Alert();
  const token = el("input", { type: "password", autocomplete: "off" });
  const keep = async (value, words) => {
    await ask("ui/models/token", { body: { token: value } });
    token.value = "";
    alert.say(words, "good");
  };
  return el("details", {}, el("summary", { text: t("token.title") }),
    el("div", { class: "fr-form" },
      field(t("token.label"), token, t("token.hint")),
      el("div", { class: "fr-actions" }, ...forAdmins(
        button(t("token.keep"), () => keep(token.value.trim(), t("token.kept")), { alert, kind: "primary" }),
        button(t("token.forget"), () => keep(null, t("token.forgotten")), { alert }))),
      alert.element,
    ));
}

/** A model's own sampling and way of loading; an empty field goes back to the catalogue's, or to the settings'.
 *  What comes of it is told in `alert`, which outlives the form: what was kept draws a new one. */
export function defaultsForm(model, deeds, isAdmin, alert) {
  const inputs = {
    temperature: numberInput(model, "temperature", { min: 0, max: 100, step: "any" }),
    top_p: numberInput(model, "top_p", { min: 0.001, max: 1, step: "any" }),
    top_k: numberInput(model, "top_k", { min: 0, max: 1000000, step: 1 }),
    max_model_len: numberInput(model, "max_model_len", { min: 1, step: 1 }),
    kv_cache_dtype: select(KV_DTYPES.map((each) => [each, each || t("defaults.unset")]), model.defaults.kv_cache_dtype ?? ""),
  };
  const form = el("form", { class: "fr-form" },
    el("h4", { text: t("defaults.title") }),
    el("p", { class: "fr-quiet", text: t("defaults.hint") }),
    el("div", { class: "fr-fields" }, ...Object.entries(inputs).map(([name, input]) => field(t(`defaults.${name}`), input))),
    el("button", { type: "submit", class: "fr-button", text: t("defaults.keep"), disabled: !isAdmin, title: isAdmin ? null : t("models.takes_admin") }),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submitted(form, alert, async () => {
      await deeds.keepDefaults(model.id, valuesOf(inputs));
      alert.say(t("defaults.kept"), "good");
    });
  });
  return form;
}

function numberInput(model, name, limits) {
  return el("input", { type: "number", value: String(model.defaults[name] ?? ""), placeholder: t("defaults.unset"), ...limits });
}

function valuesOf(inputs) {
  const read = (input) => (input.value === "" ? null : input.type === "number" ? Number(input.value) : input.value);
  return Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, read(input)]));
}

async function submitted(form, alert, work) {
  const send = form.querySelector("[type=submit]");
  send.disabled = true;
  try {
    await work();
  } catch (error) {
    alert.say(error.message);
  } finally {
    send.disabled = false;
  }
}
