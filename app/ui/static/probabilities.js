// An answer token by token: how likely each was, and on hover (or with the keyboard) the likeliest ones at its place.
import { el } from "./core.js";

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

/** tokens: [text, log-probability, [[text, log-probability], ...]] */
export function drawProbabilities(tokens) {
  const told = el("div", { class: "fs-likeliest", role: "tooltip", hidden: true });
  const text = el("div", { class: "fs-tokens" }, ...tokens.filter(([text]) => text).map(drawToken), told);
  const show = (event) => tell(told, event.target.closest(".fs-token"), text, tokens.filter(([text]) => text));
  text.addEventListener("mouseover", show);
  text.addEventListener("focusin", show);
  text.addEventListener("mouseleave", () => { told.hidden = true; });
  return text;
}

function drawToken([text, logprob], index) {
  const token = el("span", { class: "fs-token", tabIndex: 0, text, data: { index } });
  token.style.setProperty("--doubt", `${Math.round(70 * (1 - Math.exp(logprob)))}%`);
  return token;
}

function tell(told, token, root, tokens) {
  told.hidden = !token;
  if (!token) return;
  const [text, logprob, likeliest] = tokens[token.dataset.index];
  told.replaceChildren(
    el("strong", { text: `${JSON.stringify(text)} ${percent(logprob)}` }),
    el("ol", {}, ...likeliest.map(([other, each]) => el("li", { text: `${JSON.stringify(other)} ${percent(each)}` }))));
  const place = token.getBoundingClientRect(), frame = root.getBoundingClientRect();
  told.style.left = `${Math.max(0, Math.min(place.left - frame.left, frame.width - 180))}px`;
  told.style.top = `${place.bottom - frame.top + 4}px`;
}
