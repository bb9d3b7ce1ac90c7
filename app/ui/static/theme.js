// Light, dark, or as the system has it. Gradio's stylesheet follows the class "dark" of the body.
import { language, recall, remember } from "./core.js";

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
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
}

/** From the beginning of the page on, whatever the system changes to later. */
export function applyTheme() {
  document.documentElement.lang = language();
  draw();
  systemIsDark.addEventListener("change", () => setTimeout(draw)); // after Gradio, which follows the system alone
}
