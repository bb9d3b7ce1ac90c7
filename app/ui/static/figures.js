// Numbers of an answer: the line below the conversation, the context meter, and "why did this take so long?".
import { el, language, t } from "./core.js";

const number = new Intl.NumberFormat(language());

export function seconds(value) {
  return value < 10 ? value.toFixed(2) : value.toFixed(1);
}

/** One line on an answer: its speed, its beginning, and what the conversation takes of the context. */
export function figuresLine({ timings, ttft_s, usage, max_model_len }) {
  const known = [];
  if (timings?.predicted_per_second) known.push(t("chat.speed", { speed: timings.predicted_per_second.toFixed(1) }));
  if (ttft_s !== undefined && ttft_s !== null) known.push(t("chat.first", { seconds: seconds(ttft_s) }));
  if (usage) known.push(contextWords(usage, max_model_len));
  return known.join(" · ");
}

function contextWords(usage, room) {
  const used = number.format(usage.prompt_tokens + usage.completion_tokens);
  const words = room ? t("chat.context_of", { used, total: number.format(room) }) : t("chat.context", { used });
  return usage.cached_tokens ? `${words}, ${t("chat.context_cached", { cached: number.format(usage.cached_tokens) })}` : words;
}

/** A meter of the context: what is used, and how much of that came from the cache. */
export function drawMeter(element, { usage, max_model_len }) {
  element.hidden = !usage || !max_model_len;
  if (element.hidden) return;
  const used = usage.prompt_tokens + usage.completion_tokens;
  element.setAttribute("aria-valuemax", max_model_len);
  element.setAttribute("aria-valuenow", used);
  element.title = contextWords(usage, max_model_len);
  element.setAttribute("aria-valuetext", element.title);
  element.style.setProperty("--used", `${Math.min(100, 100 * used / max_model_len)}%`);
  element.style.setProperty("--cached", `${Math.min(100, 100 * usage.cached_tokens / max_model_len)}%`);
  element.dataset.full = used > 0.9 * max_model_len;
}

/** Where the time of an answer went; of one that was stopped, as far as that is known. */
export function drawFigures(details, meta) {
  const { timings, usage, wait_s, ttft_s, thinking_s } = meta;
  const cached = usage?.cached_tokens ?? 0;
  const rows = [
    [t("chat.why_wait"), wait_s],
    [t("chat.why_queue"), timings.queue_s],
    [t("chat.why_prefill", { computed: number.format((usage?.prompt_tokens ?? 0) - cached), cached: number.format(cached) }),
      timings.prefill_s],
    [t("chat.why_total"), ttft_s],
    [t("chat.why_decode", { tokens: number.format(usage?.completion_tokens ?? 0), speed: timings.predicted_per_second.toFixed(1) }),
      timings.decode_s],
    [t("chat.why_thinking"), thinking_s],
  ].filter(([, value]) => value !== undefined && value !== null);
  const longest = Math.max(...rows.map(([, value]) => value), 1e-9);
  details.replaceChildren(
    el("summary", { text: t("chat.why") }),
    el("table", {}, el("tbody", {}, ...rows.map(([words, value]) => el("tr", {},
      el("th", { scope: "row", text: words }),
      el("td", { text: t("chat.seconds", { seconds: seconds(value) }) }),
      el("td", { "aria-hidden": "true" }, bar(value / longest)))))));
}

function bar(share) {
  const element = el("span", { class: "fs-share" });
  element.style.width = `${Math.round(share * 100)}%`;
  return element;
}
