// Search of the hub, each hit with a word on whether it fits. The server asks the hub, and only when this is sent.
import { ask, el, localized, t } from "./core.js";
import { drawForecast, fitBadge } from "./forecast.js";
import { bytes, number } from "./format.js";
import { Alert, badge, button, field, forAdmins, select } from "./parts.js";

const FORMATS = ["", "awq", "gptq", "compressed-tensors"];

export function hubSearch(deeds) {
  const alert = new Alert();
  const hits = el("ul", { class: "fr-rows" });
  const words = el("input", { type: "search", placeholder: "qwen3 awq", autocomplete: "off" });
  const format = select(FORMATS.map((each) => [each, each || t("hub.any")]), "");
  const mostGb = el("input", { type: "number", min: 0.1, step: "any", placeholder: t("hub.any") });
  const licence = el("input", { type: "text", placeholder: "apache-2.0", autocomplete: "off" });
  const form = el("form", { class: "fr-form", role: "search" },
    el("p", { class: "fr-quiet", text: t("hub.hint") }),
    el("div", { class: "fr-fields" },
      field(t("hub.words"), words), field(t("hub.format"), format),
      field(t("hub.max_gb"), mostGb), field(t("hub.licence"), licence)),
    ...forAdmins(el("button", { type: "submit", class: "fr-button primary", text: t("hub.search") })),
    alert.element,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    alert.say(t("hub.asking"), "info");
    const query = new URLSearchParams({ q: words.value.trim() });
    for (const [name, input] of [["format", format], ["max_gb", mostGb], ["licence", licence]]) {
      if (input.value.trim()) query.set(name, input.value.trim());
    }
    try {
      const { data } = await ask(`ui/models/search?${query}`);
      alert.say(t("hub.found", { n: data.length }), "info");
      hits.replaceChildren(...data.map((hit) => hitRow(hit, deeds)));
    } catch (error) {
      hits.replaceChildren();
      alert.say(error.message);
    }
  });
  return el("div", {}, form, hits);
}

function hitRow(hit, deeds) {
  const alert = new Alert();
  const forecast = el("div");
  const details = el("details", {}, el("summary", { text: t("models.more") }), forecast);
  details.addEventListener("toggle", () => {
    if (details.open && !forecast.hasChildNodes()) drawForecast(forecast, hit.repo);
  });
  const actions = hit.state
    ? [badge(t(`models.state.${hit.state}`), "info")]
    : hit.fit === "unsupported" ? [] : [
      button(t("models.download"), () => deeds.download(hit.repo), { alert, label: `${t("models.download")}: ${hit.repo}` }),
      button(t("hub.add"), () => added(hit, deeds, alert), { alert, label: `${t("hub.add")}: ${hit.repo}` }),
    ];
  return el("li", { class: "fr-row" },
    el("div", { class: "fr-row-head" },
      el("div", { class: "fr-row-name" }, el("strong", { text: hit.repo }), el("span", { class: "fr-badges" }, ...badges(hit))),
      el("div", { class: "fr-actions" }, ...actions)),
    hit.why ? el("p", { class: "fr-quiet", text: localized(hit.why) }) : null,
    alert.element,
    details,
  );
}

async function added(hit, deeds, alert) {
  const model = await deeds.add(hit.repo, null);
  alert.say(t("add.added", { id: model.id }), "good");
  await deeds.refresh();
}

function badges(hit) {
  return [
    fitBadge(hit.fit, hit.why),
    hit.weights_bytes ? badge(bytes(hit.weights_bytes)) : null,
    badge(hit.format),
    hit.licence ? badge(hit.licence) : null,
    hit.is_gated ? badge(t("hub.gated"), "fair") : null,
    badge(t("hub.downloads", { n: number(hit.downloads) })),
  ].filter(Boolean);
}
