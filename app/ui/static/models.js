// The room "models": what is in memory, the catalogue and what of it is here, the hub, one's own models, the disk.
import { ask, el, live, t } from "./core.js";
import { bytes } from "./format.js";
import { addModelForm, tokenForm } from "./model_forms.js";
import { ModelRow } from "./model_row.js";
import { hubSearch } from "./hub_search.js";
import { Alert, allow, button, field, forAdmins, freshId, select, stackedBar } from "./parts.js";

const LOOK_EVERY_MS = 1000; // at downloads, while one is under way and the room is shown
const MOST_IN_VAIN = 3; // models that the hub is asked about without an answer
const UNDER_WAY = ["queued", "downloading", "verifying"];

const room = {
  me: { is_admin: false },
  rows: new Map(), // id -> ModelRow
  statuses: new Map(), // id -> status of a model in memory
  downloads: new Map(), // repository -> download
  root: null, list: null, empty: null, filter: null, shown: null, alert: null, disk: null,
  timer: null, unwatch: null,
};

export function start(root) {
  root.classList.add("fr-room");
  room.root = root;
  room.alert = new Alert();
  room.list = el("ul", { class: "fr-rows", "aria-label": t("models.list") });
  room.empty = el("p", { class: "fr-quiet", text: t("models.none"), hidden: true });
  room.disk = el("div");
  root.append(
    el("h2", { text: t("frame.models") }),
    room.alert.element,
    toolbar(),
    room.list,
    room.empty,
    section("models.hub", hubSearch(deeds)),
    section("models.own", addModelForm(deeds), tokenForm()),
    section("models.disk", room.disk),
  );
}

export async function opened() {
  room.unwatch ??= live.watch("models", heardOfModels);
  await refresh();
}

export function closed() {
  room.unwatch?.();
  room.unwatch = null;
  clearTimeout(room.timer);
}

function section(key, ...children) {
  const id = freshId("section");
  return el("section", { class: "fr-card", "aria-labelledby": id }, el("h3", { id, text: t(key) }), ...children);
}

function toolbar() {
  room.filter = el("input", { type: "search", placeholder: t("models.filter"), "aria-label": t("models.filter") });
  room.shown = select(
    [["all", t("models.all")], ["here", t("models.here")], ["fits", t("models.fits")]],
    "all",
    { "aria-label": t("models.which") },
  );
  for (const input of [room.filter, room.shown]) input.addEventListener("input", applyFilter);
  const check = button(t("models.check"), checkWhichFit, { alert: room.alert });
  return el("div", { class: "fr-toolbar" }, room.filter, room.shown, ...forAdmins(check));
}

/** A size alone is a guess; headers tell exactly. Those on this machine are read there, the others' are asked of the hub
 *  one by one, until it is plain that it cannot be reached. */
async function checkWhichFit() {
  const shown = [...room.rows.values()].filter((row) => !row.isJudged && !row.element.hidden);
  const rows = shown.sort((a, b) => (b.model.state === "ready") - (a.model.state === "ready"));
  let failed = [];
  let at = 0;
  while (at < rows.length && failed.length < MOST_IN_VAIN) {
    room.alert.say(t("models.checking", { n: rows.length - at }), "info");
    try {
      await rows[at].judge();
    } catch (error) {
      failed = [...failed, error.message];
    }
    at += 1;
  }
  const judged = at - failed.length;
  if (!failed.length) room.alert.say(t("models.checked", { n: judged }), "good");
  else room.alert.say(t("models.checked_some", { n: judged, left: rows.length - judged, why: failed.at(-1) }), "error");
  applyFilter();
}

function applyFilter() {
  const words = room.filter.value.trim().toLowerCase().split(/\s+/);
  let count = 0;
  for (const row of room.rows.values()) {
    row.element.hidden = !(words.every((word) => row.text.includes(word)) && row.isOf(room.shown.value));
    count += !row.element.hidden;
  }
  room.empty.hidden = count > 0;
}

// -- reading

/** Read the whole shelf again, and draw what has changed. */
async function refresh() {
  try {
    const [me, shelf] = await Promise.all([ask("ui/me"), ask("ui/models/shelf")]);
    room.me = me;
    if (!me.is_admin) room.alert.say(t("models.not_admin", { name: me.name }), "info");
    drawRows(shelf.models);
    allow(room.root, me.is_admin, t("models.takes_admin"));
    await readDownloads();
    drawDisk(await ask("ui/models/disk"));
  } catch (error) {
    room.alert.say(error.message);
  }
}

function drawRows(models) {
  const rows = new Map();
  for (const model of models) {
    const row = room.rows.get(model.id) ?? new ModelRow(deeds);
    row.take(model, room.me.is_admin);
    rows.set(model.id, row);
  }
  room.rows = rows;
  const elements = [...rows.values()].sort((a, b) => b.rank - a.rank).map((row) => row.element);
  if (elements.some((element, at) => room.list.children[at] !== element) || elements.length !== room.list.children.length) {
    room.list.replaceChildren(...elements);
  }
  tellRows();
  applyFilter();
}

async function readDownloads() {
  clearTimeout(room.timer);
  if (!room.me.is_admin) return;
  const before = room.downloads;
  const { data } = await ask("ui/models/downloads");
  room.downloads = new Map(data.map((download) => [download.model, download]));
  tellRows();
  const isDone = [...before.values()].some((each) => isUnderWay(each) && !isUnderWay(room.downloads.get(each.model)));
  if (isDone) return refresh();
  if (data.some(isUnderWay) && room.unwatch) {
    room.timer = setTimeout(() => readDownloads().catch((error) => room.alert.say(error.message)), LOOK_EVERY_MS);
  }
}

function isUnderWay(download) {
  return UNDER_WAY.includes(download?.state);
}

function heardOfModels(event) {
  if (event.kind === "again") { // the server was away: what it said of downloads may have stopped in mid-sentence
    room.alert.clear();
    refresh();
  }
  if (event.kind !== "state") return;
  const before = room.statuses;
  room.statuses = new Map(event.models.map((status) => [status.model, status]));
  tellRows();
  const wasLoading = [...before.values()].some((status) => status.state === "loading");
  const isLoading = event.models.some((status) => status.state === "loading");
  if (wasLoading && !isLoading) refresh(); // a load may have fetched or made something
}

function tellRows() {
  const inHand = room.statuses.keys().next().value;
  for (const row of room.rows.values()) {
    row.tell(room.statuses.get(row.model.id), room.downloads.get(row.model.origin), row.model.id === inHand);
  }
}

// -- doing

/** What rows and forms may do; each throws what the server refuses. */
const deeds = {
  load: (model) => post("load", model),
  unload: (model) => post("unload", model),
  download: (model) => ask("ui/models", { body: { model } }).then(readDownloads).then(refresh),
  pause: (model) => post("downloads/pause", model).then(readDownloads),
  resume: (model) => post("downloads/resume", model).then(readDownloads),
  cancel: (model) => post("downloads/cancel", model).then(refresh),
  verify: (model) => post("verify", model),
  async remove(model) {
    const { freed_bytes: freed } = await ask(`ui/models?model=${encodeURIComponent(model)}`, { method: "DELETE" });
    await refresh();
    room.alert.say(t("models.freed", { id: model, size: bytes(freed) }), "good");
  },
  keepDefaults: (model, values) => ask("ui/models/defaults", { body: { model, ...values } }).then(refresh),
  add: (model, id) => ask("ui/models/add", { body: { model, id } }),
  refresh,
  show(id) {
    room.filter.value = id;
    room.shown.value = "all";
    applyFilter();
    room.rows.get(id)?.open();
  },
};

function post(way, model) {
  return ask(`ui/models/${way}`, { body: { model } });
}

// -- the disk

function drawDisk(disk) {
  const models = disk.models.reduce((sum, [, size]) => sum + size, 0);
  const rest = disk.other.reduce((sum, [, size]) => sum + size, 0);
  const parts = [
    { name: "weights", size: models, text: t("disk.models", { size: bytes(models) }) },
    { name: "workspace", size: rest, text: t("disk.rest", { size: bytes(rest) }) },
    { name: "others", size: disk.total_bytes - disk.free_bytes - models - rest, text: t("disk.others", { size: bytes(disk.total_bytes - disk.free_bytes - models - rest) }) },
    { name: "free", size: disk.free_bytes, text: t("disk.free", { size: bytes(disk.free_bytes) }) },
  ];
  const other = disk.other.map(([what, size]) => [t(`disk.of.${what}`), size]);
  const largest = [...disk.models, ...other].sort((a, b) => b[1] - a[1]);
  room.disk.replaceChildren(
    stackedBar(parts, t("models.disk")),
    el("p", { class: "fr-quiet", text: t("disk.home", { home: disk.home }) }),
    el("table", { class: "fr-table" }, el("tbody", {}, ...largest.map(([name, size]) => (
      el("tr", {}, el("th", { scope: "row", text: name }), el("td", { text: bytes(size) }))
    )))),
  );
}
