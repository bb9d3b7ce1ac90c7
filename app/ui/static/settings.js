// The room "settings": how the page looks, how others connect, the keys, and every setting with where it comes from.
import { ask, el, language, localized, onRemembered, remember, t } from "./core.js";
import { connectCard } from "./connect.js";
import { keysCard } from "./api_keys.js";
import { Alert, badge, button, field, freshId, select } from "./parts.js";
import { chooseTheme, theme, THEMES } from "./theme.js";

const LANGUAGES = [["en", "English"], ["zh", "中文"]];
const room = { alert: null, list: null, none: null, filter: null, file: null, connect: null, keys: null, rows: new Map(), said: new Map(), isAdmin: false };

export function start(root) {
  root.classList.add("fr-room");
  room.alert = new Alert();
  room.list = el("ul", { class: "fr-rows", "aria-label": t("settings.all") });
  room.none = el("p", { class: "fr-quiet", role: "status", text: t("settings.none"), hidden: true });
  room.file = el("p", { class: "fr-quiet" });
  room.filter = el("input", { type: "search", placeholder: t("settings.filter"), "aria-label": t("settings.filter") });
  room.filter.addEventListener("input", applyFilter);
  room.connect = connectCard();
  room.keys = keysCard((hasKeys) => room.connect.setAsksKey(hasKeys));
  root.append(
    el("h2", { text: t("frame.settings") }),
    el("div", { class: "fr-grid" }, section("settings.look", look()), section("settings.keys", room.keys.element)),
    section("settings.connect", room.connect.element),
    section("settings.all", room.file, el("div", { class: "fr-toolbar" }, room.filter), room.alert.element, room.list, room.none),
  );
}

export async function opened() {
  room.connect.opened();
  try {
    room.isAdmin = (await ask("ui/me")).is_admin;
    draw(await ask("ui/settings"));
  } catch (error) {
    room.alert.say(error.message);
  }
  await room.keys.read();
}

export function closed() {
  room.connect.closed();
}

function section(key, ...children) {
  const id = freshId("section");
  return el("section", { class: "fr-card", "aria-labelledby": id }, el("h3", { id, text: t(key) }), ...children);
}

function look() {
  const themes = select(THEMES.map((each) => [each, t(`theme.${each}`)]), theme());
  themes.addEventListener("change", () => chooseTheme(themes.value));
  onRemembered("theme", () => { themes.value = theme(); });
  const languages = select(LANGUAGES, language());
  languages.addEventListener("change", () => {
    remember("language", languages.value);
    location.reload();
  });
  return el("div", { class: "fr-form" }, field(t("settings.theme"), themes), field(t("settings.language"), languages));
}

// -- every setting

function draw({ file, rows }) {
  room.file.textContent = t("settings.hint", { file });
  const open = new Set([...room.rows].filter(([, row]) => row.querySelector("details")?.open).map(([name]) => name));
  room.rows = new Map(rows.map((row) => [row.name, settingRow(row, open.has(row.name))]));
  room.list.replaceChildren(...room.rows.values());
  applyFilter();
}

function applyFilter() {
  const words = room.filter.value.trim().toLowerCase();
  for (const row of room.rows.values()) row.hidden = !row.textContent.toLowerCase().includes(words);
  room.none.hidden = [...room.rows.values()].some((row) => !row.hidden) || room.rows.size === 0;
}

function settingRow(row, isOpen) {
  const facts = [
    t("settings.default", { value: localized(row.default) }),
    t("settings.from", { source: localized(row.source) }),
    `${row.flag} · ${row.env}`,
  ];
  return el("li", { class: "fr-row", data: { setting: row.name } },
    el("div", { class: "fr-row-head" },
      el("div", { class: "fr-row-name" }, el("strong", { text: row.name }), el("code", { class: "fr-value", text: shown(row.value, row) }), ...marks(row)),
      el("small", { text: t(`settings.applies.${row.applies}`) })),
    el("p", { text: helpWords(row) }),
    el("p", { class: "fr-quiet", text: facts.join(" · ") }),
    row.is_fixed ? el("p", { class: "fr-quiet", text: fixedWords(row) }) : editor(row, isOpen));
}

function marks(row) {
  if (!row.is_pending) return [];
  const words = row.applies === "load" ? "settings.pending_load" : "settings.pending_start";
  return [badge(t(words, { value: shown(row.to_come, row) }), "fair")];
}

function shown(value, row) {
  if (row.is_secret || value === null || value === undefined) return value === null || value === undefined ? t("settings.unset") : value;
  if (Array.isArray(value)) return value.join(", ") || t("settings.unset");
  if (typeof value === "boolean") return t(value ? "settings.on" : "settings.off");
  return String(value);
}

/** A flag that turns something off says what it does, not what the setting is. */
function helpWords({ flag, help }) {
  return flag.startsWith("--no-") ? `${flag}: ${localized(help)}` : localized(help);
}

function fixedWords(row) {
  if (row.source.startsWith("flag") || row.source.startsWith("environment")) return t("settings.fixed", { source: localized(row.source) });
  return t(row.name === "home" ? "settings.fixed_home" : "settings.fixed_secret");
}

function editor(row, isOpen) {
  const alert = new Alert();
  room.said.set(row.name, alert);
  const input = inputOf(row);
  const keep = async (value) => {
    draw(await ask("ui/settings", { body: { name: row.name, value } }));
    room.said.get(row.name).say(t("settings.kept", { name: row.name, when: t(`settings.applies.${row.applies}`) }), "good");
  };
  const title = room.isAdmin ? null : t("models.takes_admin");
  const isDefault = row.source === "default" && !row.is_pending;
  return el("details", { open: isOpen }, el("summary", { text: t("settings.change") }),
    el("div", { class: "fr-form" },
      field(row.name, input, t("settings.allowed", { allowed: localized(row.allowed) })),
      el("div", { class: "fr-actions" },
        button(t("settings.keep"), () => keep(valueOf(row, input)), { alert, kind: "primary", disabled: !room.isAdmin, title }),
        button(t("settings.back"), () => keep(null), { alert, disabled: !room.isAdmin || isDefault, title })),
      alert.element));
}

function inputOf(row) {
  const value = row.to_come;
  if (row.kind === "choice") return select(row.choices.map((each) => [each, each]), value);
  if (row.kind === "switch") return select([["true", t("settings.on")], ["false", t("settings.off")]], String(value));
  if (row.kind === "list") return el("textarea", { rows: 3, value: (value ?? []).join("\n") }, (value ?? []).join("\n"));
  return el("input", { type: "text", value: value === null ? "" : String(value), autocomplete: "off" });
}

function valueOf(row, input) {
  if (row.kind === "switch") return input.value === "true";
  if (row.kind === "list") return input.value.split("\n").map((line) => line.trim()).filter(Boolean);
  return input.value.trim() === "" ? null : input.value.trim();
}
