// Light, dark, or as the system has it. Gradio's stylesheet follows the class "dark" of the body.
import { language, onRemembered, recall, remember } from "./core.js";

export const THEMES = ["system", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

export function theme() {
  const chosen = recall("theme", "system");
  return THEMES.includes(chosen) ? chosen : "system";
}

export function chooseTheme(chosen) {
  remember("theme", chosen);
  draw();
}

function draw() {
  const isDark = theme() === "dark" || (theme() === "system" && systemIsDark.matches);
  document.body.classList.toggle("dark", isDark);
  const root = document.documentElement;
  root.style.colorScheme = isDark ? "dark" : "light";
  if (root.lang !== language()) root.lang = language();
}

/** From the beginning of the page on, whatever the system changes to later. */
export function applyTheme() {
  draw();
  systemIsDark.addEventListener("change", draw);
  onRemembered("theme", draw);
  // Gradio knows the system's theme and its own language alone, and says so when it is there at last: ours stand.
  const observer = new MutationObserver(draw);
  observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
}
