// The keys of the API: which there are, a new one (its words are shown this once), one less.
import { ask, el, t } from "./core.js";
import { Alert, allow, askedTwice, badge, copyButton, field, forAdmins } from "./parts.js";

/** onChange(hasKeys) is called with each reading. Returns {element, read}. */
export function keysCard(onChange) {
  const alert = new Alert();
  const list = el("ul", { class: "fr-rows" });
  const made = el("div", { role: "status" });
  const hint = el("p", { class: "fr-quiet" });
  let shown = ""; // the key whose words are still on the page
  const form = newKeyForm(alert, async (name, isAdmin) => {
    const { key } = await ask("ui/keys", { body: { name, is_admin: isAdmin } });
    shown = name;
    made.replaceChildren(shownOnce(name, key));
    await read();
  });

  async function read() {
    try {
      const { keys, file } = await ask("ui/keys");
      hint.textContent = keys.length ? t("keys.hint", { file }) : t("keys.none");
      allow(form.element, true, "");
      if (!keys.some((key) => key.name === shown)) made.replaceChildren();
      list.replaceChildren(...keys.map((key) => row(key, alert, read)));
      form.isFirst(keys.length === 0);
      onChange(keys.length > 0);
    } catch (error) {
      if (error.status === 403) {
        onChange(true);
        allow(form.element, false, t("models.takes_admin"));
      }
      alert.say(error.message, error.status === 403 ? "info" : "error");
    }
  }
  return { element: el("div", {}, hint, list, form.element, alert.element, made), read };
}

function row({ name, is_admin: isAdmin, is_in_file: isInFile }, alert, read) {
  const words = { first: t("keys.delete"), sure: () => t("models.delete_sure"), keep: t("models.keep"), label: `${t("keys.delete")}: ${name}` };
  const remove = askedTwice(words, async () => {
    await ask(`ui/keys?name=${encodeURIComponent(name)}`, { method: "DELETE" });
    await read();
  }, alert);
  return el("li", { class: "fr-row" }, el("div", { class: "fr-row-head" },
    el("div", { class: "fr-row-name" }, el("strong", { text: name }), badge(t(isAdmin ? "keys.admin" : "keys.user"), isAdmin ? "info" : "")),
    el("div", { class: "fr-actions" }, ...isInFile ? remove : [el("small", { text: t("keys.elsewhere") })])));
}

function newKeyForm(alert, make) {
  const name = el("input", { type: "text", required: true, maxlength: 64, pattern: "[A-Za-z0-9_.\\-]+", autocomplete: "off" });
  const isAdmin = el("input", { type: "checkbox" });
  const element = el("form", { class: "fr-form" },
    field(t("keys.name"), name, t("keys.name_hint")),
    el("label", { class: "fr-check" }, isAdmin, t("keys.is_admin")),
    ...forAdmins(el("button", { type: "submit", class: "fr-button", text: t("keys.make") })));
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    alert.clear();
    try {
      await make(name.value.trim(), isAdmin.checked);
      name.value = "";
    } catch (error) {
      alert.say(error.message);
    }
  });
  return {
    element,
    /** The first key is an admin's: with others alone nobody could change anything any more. */
    isFirst(isFirst) {
      isAdmin.disabled = isFirst;
      isAdmin.checked = isFirst;
    },
  };
}

function shownOnce(name, key) {
  const words = { copy: t("connect.copy"), copied: t("connect.copied"), failed: t("connect.failed") };
  return el("div", { class: "fr-said", data: { kind: "good" } },
    el("p", { text: t("keys.once", { name }) }),
    el("div", { class: "fr-snippet" }, el("pre", { class: "fr-log", role: "group", tabindex: "0", "aria-label": t("keys.words") }, el("code", { text: key })), copyButton(() => key, words)));
}
