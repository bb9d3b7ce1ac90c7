// How other programs are set up for this server, with its address and the model in hand; docs/clients.md has more.
import { el, live, setText, t } from "./core.js";
import { copyButton, field, select } from "./parts.js";

/** Each: where it goes (a key of the words), and the text. */
const PROGRAMS = {
  "OpenAI (Python)": ["code", ({ base, model, key }) => `from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key="${key}")
answer = client.chat.completions.create(
    model="${model}",
    messages=[{"role": "user", "content": "Hello!"}],
)
print(answer.choices[0].message.content)`],
  curl: ["terminal", ({ base, model, key }) => `curl ${base}/v1/chat/completions \\
  -H "Authorization: Bearer ${key}" -H "Content-Type: application/json" \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello!"}]}'`],
  Continue: ["continue", ({ base, model, key }) => `name: Local
version: 0.0.1
schema: v1
models:
  - name: Fireside
    provider: openai
    model: ${model}
    apiBase: ${base}/v1
    apiKey: ${key}
    roles: [chat, edit, apply]
    capabilities: [tool_use]`],
  "Cline, Roo Code": ["cline", ({ base, model, key, context }) => `API Provider:        OpenAI Compatible
Base URL:            ${base}/v1
API Key:             ${key}
Model ID:            ${model}
Context Window Size: ${context}`],
  Zed: ["zed", ({ base, model, context }) => JSON.stringify({
    language_models: { openai_compatible: { Fireside: {
      api_url: `${base}/v1`,
      available_models: [{
        name: model,
        max_tokens: context,
        capabilities: { tools: true, images: false, parallel_tool_calls: true, prompt_cache_key: false },
      }],
    } } },
  }, null, 2)],
  "VS Code (Copilot Chat)": ["vscode", ({ base, model, context }) => JSON.stringify({
    id: model,
    name: "Fireside",
    url: `${base}/v1/chat/completions`,
    apiType: "chat-completions",
    toolCalling: true,
    vision: false,
    maxInputTokens: Math.floor(context * 0.85),
    maxOutputTokens: Math.floor(context * 0.15),
  }, null, 2)],
  "JetBrains AI Assistant": ["jetbrains", ({ base, key }) => `Provider: OpenAI-compatible
URL:      ${base}/v1
API Key:  ${key}`],
  "llama.vscode": ["llama", ({ base }) => `Endpoint_chat:       ${base}
Endpoint_completion: ${base}`],
  aider: ["terminal", ({ base, model, key }) => `OPENAI_API_BASE=${base}/v1 OPENAI_API_KEY=${key} aider --model openai/${model}`],
  "Claude Code": ["terminal", ({ base, model, key }) => `ANTHROPIC_BASE_URL=${base} ANTHROPIC_API_KEY=${key} ANTHROPIC_MODEL=${model} \\
ANTHROPIC_SMALL_FAST_MODEL=${model} CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 claude`],
  "Open WebUI": ["webui", ({ base, key }) => `URL:     ${base.replace(/127\.0\.0\.1|localhost/, "host.docker.internal")}/v1
API Key: ${key}`],
  Ollama: ["ollama", ({ base }) => base],
};

/** asksKey: whether this server wants one. Returns {element, setAsksKey, opened, closed}. */
export function connectCard() {
  const facts = { base: location.origin, model: "default", key: "none", context: 8192 };
  const which = select(Object.keys(PROGRAMS).map((name) => [name, name]), "OpenAI (Python)");
  const where = el("p", { class: "fr-quiet" });
  const text = el("code");
  const draw = () => {
    const [place, write] = PROGRAMS[which.value];
    setText(where, t(`connect.${place}`));
    setText(text, write(facts));
  };
  which.addEventListener("change", draw);
  draw();
  let unwatch = null;
  const words = { copy: t("connect.copy"), copied: t("connect.copied"), failed: t("connect.failed") };
  return {
    element: el("div", {},
      el("p", {}, `${t("connect.address")} `, el("code", { text: `${location.origin}/v1` })),
      el("div", { class: "fr-form" }, field(t("connect.program"), which), where,
        el("div", { class: "fr-snippet" }, el("pre", { class: "fr-log", role: "group", tabindex: "0", "aria-label": t("connect.snippet") }, text),
          copyButton(() => text.textContent, words)))),
    setAsksKey(asksKey) {
      facts.key = asksKey ? t("connect.your_key") : "none";
      draw();
    },
    opened() {
      unwatch ??= live.watch("status", (event) => {
        if (event.kind !== "state" || !event.model_id) return;
        [facts.model, facts.context] = [event.model_id, event.max_model_len ?? facts.context];
        draw();
      });
    },
    closed() {
      unwatch?.();
      unwatch = null;
    },
  };
}
