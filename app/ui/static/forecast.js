// How a model fits: a bar of what it takes of the memory, now and on an empty card, with what would make it fit.
import { ask, el, localized, t } from "./core.js";
import { bytes, number } from "./format.js";
import { badge, stackedBar } from "./parts.js";

const KINDS = { fits: "good", tight: "fair", "too large": "bad" };

/** The word on whether a model fits; `why` as its title. */
export function fitBadge(word, why = "") {
  return badge(t(`fit.${word.replace(" ", "_")}`), KINDS[word] ?? "", localized(why) || null);
}

/** Fills `root` with the forecast of a model, read from headers: from the disk, or over the hub. */
export async function drawForecast(root, model) {
  root.replaceChildren(el("p", { class: "fr-quiet", role: "status", text: t("fit.reading") }));
  try {
    const report = await ask(`ui/models/fit?model=${encodeURIComponent(model)}`);
    root.replaceChildren(facts(report), ...report.fits.map((fit) => onMachine(fit)));
  } catch (error) {
    root.replaceChildren(el("p", { class: "fr-said", role: "status", data: { kind: "error" }, text: error.message }));
  }
}

function facts(report) {
  const perThousand = Object.entries(report.kv_bytes_per_1k).map(([dtype, size]) => `${dtype} ${bytes(size)}`).join(", ");
  const told = [
    `${report.architecture}, ${report.format}`,
    t("fit.context", { tokens: number(report.context_length) }),
    t("fit.per_thousand", { sizes: perThousand }),
  ];
  if (report.window_layers) {
    const values = { n: report.window_layers, all: report.num_layers, window: number(report.window) };
    told.push(t("fit.windows", values));
  }
  return el("p", { class: "fr-quiet", text: told.join(" · ") });
}

function onMachine(fit) {
  const title = el("h4", {}, `${localized(fit.machine)} `, fitBadge(fit.verdict));
  const known = fit.max_context
    ? t("fit.room", { context: number(fit.max_context), chats: number(fit.chats), dtype: fit.kv_dtype })
    : "";
  return el("section", { class: "fr-forecast" },
    title,
    stackedBar(parts(fit), `${localized(fit.machine)}: ${t(`fit.${fit.verdict.replace(" ", "_")}`)}`),
    known ? el("p", { text: known }) : null,
    lines(fit.notes),
    fit.advice.length ? el("p", { text: t("fit.advice") }) : null,
    lines(fit.advice),
  );
}

function parts(fit) {
  const workspace = fit.workspace_bytes + fit.graphs_bytes;
  const sizes = {
    others: fit.total_bytes - fit.free_bytes,
    weights: fit.weights_bytes,
    kv: fit.kv_bytes,
    workspace,
    reserve: fit.reserve_bytes,
    free: Math.max(fit.free_bytes - fit.weights_bytes - fit.kv_bytes - workspace - fit.reserve_bytes, 0),
  };
  return Object.entries(sizes).map(([name, size]) => ({ name, size, text: t(`fit.part.${name}`, { size: bytes(size) }) }));
}

function lines(texts) {
  return texts.length ? el("ul", { class: "fr-notes" }, ...texts.map((text) => el("li", { text: localized(text) }))) : null;
}
