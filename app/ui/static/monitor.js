// The room "monitor": what the machine and the engine do now, told once a second while the room is shown.
import { ask, el, live, localized, setText, t } from "./core.js";
import { bytes, clock, duration, milliseconds, number, percent } from "./format.js";
import { Alert, button, field, freshId, stackedBar } from "./parts.js";
import { histogram, line, quantile } from "./plots.js";

const KEPT = 120; // values of a line, one a second
const CELLS = 240; // of the map of the KV pool
const LATELY_EVERY_MS = 3000;
const ends = () => ({ from: t("monitor.ago", { time: duration(KEPT) }), to: t("monitor.now") });

const room = {
  cards: {}, speed: [], busy: [], before: null,
  slider: null, given: null, unwatch: null, timer: null,
  log: null, // see logCard
};

export function start(root) {
  root.classList.add("fr-room");
  root.append(el("h2", { text: t("frame.monitor") }), el("div", { class: "fr-grid" },
    card("device"), card("speed"), card("pool"), card("ttft"), card("inter_token"), giveBackCard(),
  ), card("requests"), card("faults"), logCard());
}

export function opened() {
  room.unwatch ??= live.watch("monitor", (event) => { if (event.kind === "state") draw(event); });
  readLately();
}

export function closed() {
  room.unwatch?.();
  room.unwatch = null;
  room.before = null;
  clearTimeout(room.timer);
}

function card(name) {
  const id = freshId("card");
  room.cards[name] = el("div", {}, el("p", { class: "fr-quiet", text: t("monitor.waiting") }));
  return el("section", { class: "fr-card", "aria-labelledby": id }, el("h3", { id, text: t(`monitor.${name}`) }), room.cards[name]);
}

// -- once a second

function draw(now) {
  drawDevice(now);
  drawSpeed(now);
  drawPool(now);
  drawRequests(now);
  drawLatency("ttft", now.latencies.ttft);
  drawLatency("inter_token", now.latencies.inter_token);
  drawGiveBack(now.in_hand);
  room.before = now;
}

/** What looks the same stays: a selection, a focus, what is shown under the pointer. */
function fill(name, ...children) {
  const made = el("div", {}, ...children.filter(Boolean));
  if (made.innerHTML !== room.cards[name].innerHTML) room.cards[name].replaceChildren(...made.childNodes);
}

function push(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

function drawDevice({ machine, in_hand: inHand }) {
  if (!machine) return;
  const { memory, busy, temperature_c: temperature, power_w: power, promised_bytes: promised } = machine;
  const used = memory.total - memory.free + promised; // as a CPU's cache will have it once it is full
  const ours = inHand && inHand.device_kind === memory.kind ? inHand : { weights_bytes: 0, kv_bytes: 0, workspace_bytes: 0 };
  const held = Math.min(ours.weights_bytes + ours.kv_bytes + ours.workspace_bytes, used);
  const parts = [
    { name: "weights", size: ours.weights_bytes, text: t("fit.part.weights", { size: bytes(ours.weights_bytes) }) },
    { name: "kv", size: ours.kv_bytes, text: t("fit.part.kv", { size: bytes(ours.kv_bytes) }) },
    { name: "workspace", size: ours.workspace_bytes, text: t("fit.part.workspace", { size: bytes(ours.workspace_bytes) }) },
    { name: "others", size: used - held, text: t("fit.part.others", { size: bytes(used - held) }) },
    { name: "free", size: memory.total - used, text: t("fit.part.free", { size: bytes(memory.total - used) }) },
  ];
  if (busy !== null) push(room.busy, busy);
  const told = [
    busy === null ? "" : t("monitor.busy", { share: percent(busy) }),
    temperature === null ? "" : `${number(temperature)} °C`,
    power === null ? "" : `${number(power)} W`,
  ];
  fill("device",
    el("p", { text: `${localized(memory.name)}: ${t("models.of", { done: bytes(used), all: bytes(memory.total) })}` }),
    stackedBar(parts, t("monitor.device")),
    promised ? el("p", { class: "fr-quiet", text: t("monitor.promised", { size: bytes(promised) }) }) : null,
    el("p", { class: "fr-big", text: told.filter(Boolean).join(" · ") }),
    line(t("monitor.busy_plot"), room.busy, { capacity: KEPT, top: 1, name: percent, ...ends() }),
    memory.held.length ? el("ul", { class: "fr-notes" }, ...memory.held.map(([who, size]) => el("li", { text: `${localized(who)}: ${bytes(size)}` }))) : null,
  );
}

function drawSpeed({ engine, time }) {
  if (!engine) return fill("speed", el("p", { class: "fr-quiet", text: t("monitor.no_model") }));
  const { before } = room;
  const isSame = before?.engine && engine.generation_tokens >= before.engine.generation_tokens && time > before.time;
  const rate = isSame ? (engine.generation_tokens - before.engine.generation_tokens) / (time - before.time) : 0;
  push(room.speed, rate);
  const hits = engine.prefix_cache_queries ? engine.prefix_cache_hits / engine.prefix_cache_queries : 0;
  fill("speed",
    el("p", { class: "fr-big", text: t("monitor.rate", { n: number(rate, 1) }) }),
    line(t("monitor.speed"), room.speed, { capacity: KEPT, name: (rate) => t("monitor.rate", { n: number(rate) }), ...ends() }),
    el("p", { class: "fr-quiet", text: t("monitor.tokens", { prompt: number(engine.prompt_tokens), answer: number(engine.generation_tokens) }) }),
    el("p", { text: t("monitor.hits", { share: percent(hits) }) }),
  );
}

/** Cells of the pool, each for as many blocks: held by requests, kept for prompts to come, free. */
function drawPool({ engine, in_hand: inHand }) {
  if (!engine || !engine.num_blocks_total) return fill("pool", el("p", { class: "fr-quiet", text: t("monitor.no_model") }));
  const { num_blocks_total: all, num_blocks_used: used, num_blocks_cached: cached } = engine;
  const cells = Math.min(CELLS, all);
  const usedCells = Math.ceil((cells * used) / all), cachedCells = Math.ceil((cells * cached) / all);
  const map = el("div", { class: "fr-map", role: "img", "aria-label": t("monitor.pool_label", { used, cached, all }) });
  for (let at = 0; at < cells; at += 1) {
    map.append(el("span", { data: { part: at < usedCells ? "kv" : at < usedCells + cachedCells ? "cached" : "free" } }));
  }
  const tokens = (blocks) => number(Math.round(blocks * (inHand?.tokens_a_block ?? 16)));
  fill("pool", map,
    el("ul", { class: "fr-legend" },
      legend("kv", t("monitor.pool_used", { tokens: tokens(used) })),
      legend("cached", t("monitor.pool_cached", { tokens: tokens(cached) })),
      legend("free", t("monitor.pool_free", { tokens: tokens(all - used - cached) }))),
    el("p", { class: "fr-quiet", text: t("monitor.pool_cell", { tokens: tokens(all / cells) }) }),
    engine.num_preemptions ? el("p", { class: "fr-quiet", text: t("monitor.preempted", { n: number(engine.num_preemptions) }) }) : null,
  );
}

function legend(part, text) {
  return el("li", {}, el("span", { class: "fr-dotted", data: { part } }), text);
}

function drawRequests({ engine, requests }) {
  const counts = t("monitor.counts", { running: engine?.num_requests_running ?? 0, waiting: engine?.num_requests_waiting ?? 0 });
  const rows = requests.map((request) => el("tr", { title: request.id },
    el("td", { text: request.model }),
    el("td", { text: t(`requests.${request.class}`) }),
    el("td", { text: t(`requests.${request.stage}`) }),
    el("td", { text: promptWords(request) }),
    el("td", { text: number(request.completion_tokens) }),
    el("td", { text: milliseconds(request.seconds) })));
  if (!room.cards.requests.querySelector("table")) fill("requests", el("p"), requestsTable());
  const [told, scroll] = room.cards.requests.children; // these stay: who scrolls or has the focus here keeps it
  setText(told, counts);
  scroll.hidden = rows.length === 0;
  scroll.querySelector("tbody").replaceChildren(...rows);
}

function requestsTable() {
  const head = ["model", "class", "stage", "prompt", "answer", "time"].map((name) => el("th", { scope: "col", text: t(`requests.${name}`) }));
  return el("div", { class: "fr-scroll", role: "group", tabindex: "0", "aria-label": t("monitor.requests") },
    el("table", { class: "fr-table" }, el("thead", {}, el("tr", {}, ...head)), el("tbody")));
}

function promptWords({ prompt_tokens: all, cached_tokens: cached }) {
  return cached ? t("requests.cached", { all: number(all), cached: number(cached) }) : number(all);
}

function drawLatency(name, counts) {
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!all) return fill(name, el("p", { class: "fr-quiet", text: t("monitor.no_answers") }));
  const told = (share) => {
    const bound = quantile(counts, share);
    return bound === Infinity ? "∞" : milliseconds(bound);
  };
  fill(name,
    el("p", { text: t("monitor.quantiles", { half: told(0.5), most: told(0.99), n: number(all) }) }),
    histogram(t(`monitor.${name}`), counts, (bound) => (bound === null ? "∞" : `≤ ${milliseconds(bound)}`), number),
    el("p", { class: "fr-quiet", text: t(`monitor.${name}_axes`) }),
  );
}

// -- giving memory back

function giveBackCard() {
  const alert = new Alert();
  const made = card("give_back");
  room.slider = el("input", { type: "range", min: 0, max: 0, step: 0.1, value: "0" });
  room.given = el("output");
  room.why = el("p", { class: "fr-quiet" });
  room.give = button(t("monitor.give"), async () => {
    const report = await ask("ui/memory", { body: { give_back_gb: Number(room.slider.value) } });
    alert.say(t("monitor.given", { size: bytes(report.kv_bytes), tokens: number(report.kv_tokens) }), "good");
  }, { alert, kind: "primary" });
  room.slider.addEventListener("input", () => {
    room.isTouched = true;
    setText(room.given, `${number(room.slider.value, 1)} GB`);
  });
  fill("give_back", room.why, field(t("monitor.give_label"), room.slider), room.given, el("div", { class: "fr-actions" }, room.give), alert.element);
  return made;
}

function drawGiveBack(inHand) {
  const canGive = inHand !== null && inHand.device_kind !== "cpu";
  room.slider.disabled = room.give.disabled = !canGive;
  const why = inHand === null ? "monitor.no_model" : canGive ? "monitor.give_hint" : "monitor.give_cpu";
  setText(room.why, t(why, { size: bytes(inHand?.kv_bytes ?? 0), made: bytes(inHand?.made_kv_bytes ?? 0) }));
  if (!canGive) return;
  room.slider.max = (inHand.made_kv_bytes / 1e9).toFixed(1);
  if (room.isTouched) return;
  room.slider.value = ((inHand.made_kv_bytes - inHand.kv_bytes) / 1e9).toFixed(1);
  setText(room.given, `${number(room.slider.value, 1)} GB`);
}

// -- what happened lately

/** The log, of which only lines with the words of the filter are shown; while it is paused it stays as it is. */
function logCard() {
  const made = card("log");
  room.log = {
    lines: [], isPaused: false,
    filter: el("input", { type: "search", placeholder: t("monitor.log_filter"), "aria-label": t("monitor.log_filter") }),
    text: el("pre", { class: "fr-log", role: "group", tabindex: "0", "aria-label": t("monitor.log") }),
  };
  const pause = el("button", { type: "button", class: "fr-button", text: t("monitor.log_pause"), "aria-pressed": false });
  pause.addEventListener("click", () => {
    room.log.isPaused = !room.log.isPaused;
    pause.setAttribute("aria-pressed", room.log.isPaused);
    if (!room.log.isPaused) readLately();
  });
  room.log.filter.addEventListener("input", showLog);
  room.cards.log.replaceChildren(el("div", { class: "fr-toolbar" }, room.log.filter, pause), room.log.text);
  return made;
}

async function readLately() {
  clearTimeout(room.timer);
  try {
    const { faults, lines } = await ask("ui/monitor/lately");
    drawFaults(faults);
    if (!room.log.isPaused) await readLog(lines);
  } catch (error) {
    fill("faults", el("p", { class: "fr-quiet", text: error.message }));
    if (room.log.lines.length === 0) setText(room.log.text, error.message);
    if (error.status === 403) return;
  }
  if (room.unwatch) room.timer = setTimeout(readLately, LATELY_EVERY_MS);
}

function drawFaults(faults) {
  if (!faults.length) return fill("faults", el("p", { class: "fr-quiet", text: t("monitor.no_faults") }));
  fill("faults", el("table", { class: "fr-table" }, el("tbody", {}, ...faults.reverse().map(({ time, what, model, text }) => (
    el("tr", {}, el("td", { text: clock(time) }), el("td", { text: localized(what) }), el("td", { text: [model, localized(text)].filter(Boolean).join(": ") }))
  )))));
}

/** The app's lines, and below them those of the engine of the model in hand. */
async function readLog(lines) {
  const engine = await ask("ui/logs?lines=100").catch(() => ({ model: "", lines: [] }));
  const heading = engine.lines.length ? [`— ${t("monitor.engine_log", { model: engine.model })} —`] : [];
  room.log.lines = [...lines, ...heading, ...engine.lines];
  showLog();
}

function showLog() {
  const { text, filter, lines } = room.log;
  const words = filter.value.trim().toLowerCase();
  const shown = words ? lines.filter((each) => each.toLowerCase().includes(words)) : lines;
  const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  setText(text, shown.length ? shown.join("\n") : t("monitor.log_none"));
  if (isAtEnd) text.scrollTop = text.scrollHeight;
}
