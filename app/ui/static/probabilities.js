// An answer token by token: how likely each was, and on hover the likeliest ones at its place.
// By keys the text is one stop; arrows go from token to token.
import { el, t } from "./core.js";

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

/** With its blanks to be seen; bytes of a part of a character come as "\\xf0". */
function quoted(text) {
  return `"${text.replaceAll("\n", "\\n").replaceAll("\t", "\\t")}"`;
}

/** tokens: [text, log-probability, [[text, log-probability], ...]] */
export function drawProbabilities(tokens) {
  const shown = tokens.filter(([text]) => text);
  const told = el("div", { class: "fs-likeliest", role: "tooltip", "aria-live": "polite", hidden: true });
  const text = el("div", { class: "fs-tokens", role: "group", "aria-label": t("chat.probabilities_option") }, ...shown.map(drawToken), told);
  const show = (event) => tell(told, event.target.closest(".fs-token"), text, shown);
  const hide = () => { told.hidden = true; };
  text.addEventListener("mouseover", show);
  text.addEventListener("focusin", show);
  text.addEventListener("mouseleave", hide);
  text.addEventListener("focusout", hide);
  text.addEventListener("keydown", step);
  return text;
}

function drawToken([text, logprob], index) {
  const token = el("span", { class: "fs-token", tabIndex: index === 0 ? 0 : -1, text, data: { index } });
  token.style.setProperty("--doubt", `${Math.round(70 * (1 - Math.exp(logprob)))}%`);
  return token;
}

/** To the token before or after; the one that is left stays the text's stop of Tab no more. */
function step(event) {
  const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
  const to = next && !event.altKey ? event.target[next] : null;
  if (!to?.matches(".fs-token")) return;
  event.preventDefault();
  [event.target.tabIndex, to.tabIndex] = [-1, 0];
  to.focus();
}

function tell(told, token, root, tokens) {
  told.hidden = !token;
  if (!token) return;
  const [text, logprob, likeliest] = tokens[token.dataset.index];
  told.replaceChildren(
    el("strong", { text: `${quoted(text)} ${percent(logprob)}` }),
    el("ol", {}, ...likeliest.map(([other, each]) => el("li", { text: `${quoted(other)} ${percent(each)}` }))));
  const place = token.getBoundingClientRect(), frame = root.getBoundingClientRect();
  told.style.left = `${Math.max(0, Math.min(place.left - frame.left, frame.width - 180))}px`;
  told.style.top = `${place.bottom - frame.top + 4}px`;
}
