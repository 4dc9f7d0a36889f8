// The images, with search, favourites, selection and arrow keys.
import { deleteImage, hasFolder, olderImages, undeleteImage } from "./api.js";
import { connection, tasks } from "./tasks.js";
import { images as kept, newId } from "./store.js";
import { blobOf, crisp, fileName, forgetUrl, show } from "./pictures.js";
import { zipped } from "./zip.js";
import { $, announce, button, duration, el, icon, on, plural, save, toast } from "./ui.js";

const PAGE = 60;
let records = [];
let shown = PAGE;
/** Where the next images of the server's folder begin; null if all are here. */
let older = hasFolder() ? "" : null;
/** Whether the server's folder is being read. */
let loading = false;
let deleted = [];
/** Resolved once the server has moved the files of what was deleted. */
let deleting = null;
const selected = new Set();
const busy = new Map();
/** What a tile's actions do; set by main.js, so that this file needs none of the dialogs. */
export const actions = { open() {}, compare() {}, again() {} };

const matches = (record) => {
  if ($("favourites").ariaPressed === "true" && !record.favourite) return false;
  const { prompt, negative_prompt = "", sampler = "", seed, model = "" } = record.settings;
  const text = `${prompt} ${negative_prompt} ${sampler} ${seed} ${model}`.toLowerCase();
  return $("search").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
};

export const listed = () => records.filter(matches);
export const byId = (id) => records.find((record) => record.id === id);

export async function loadImages() {
  try {
    records = (await kept.all()).filter(({ blob, file }) => blob || (file && hasFolder()));
    sort();
  } catch {
    if (!hasFolder()) toast("This browser keeps no images. Save those that you like.");
  }
  await renderAll();
}

const sort = () => records.sort((a, b) => b.created - a.created);

/** The next images of the server's folder. What the browser keeps of an image has its inputs, too. */
async function loadOlder() {
  const page = await olderImages(older);
  // The prompt may differ, and the seed of a sheet.
  const mark = ({ file, kind, settings }) => (kind === "sheet" ? file : `${file} ${settings.seed}`);
  const here = new Set(records.map(mark));
  for (const { file, ...image } of page.images) {
    image.settings.prompt ??= "";
    if (here.has(mark({ file, ...image }))) continue;
    records.push({ id: `file:${encodeURIComponent(file)}`, favourite: false, ...image, file });
  }
  older = page.next;
  sort();
}

/** Show the tiles, with as many images of the server's folder as there is room for. */
export async function renderAll() {
  loading = older !== null;
  render();
  try {
    while (older !== null && listed().length < shown) {
      await loadOlder();
      render();
    }
  } catch (error) {
    if (error.status !== 401) toast(`The folder of images cannot be read: ${error.message}`);
  }
  loading = false;
  refresh();
}

/** A finished image of a task: kept, and shown in the place of its tile. */
export async function addRecord(fields, place = null) {
  const record = { id: newId(), kind: "image", favourite: false, ...fields };
  if (byId(record.id)) {  // kept before a reload in the middle of its job
    place?.remove();
    return refresh();
  }
  // Where the folder was read before a job was followed to its end, the image is in both.
  const twin = record.file && records.find(({ file, blob }) => !blob && file === record.file);
  if (twin) $("tiles").querySelector(`[data-id="${twin.id}"]`)?.remove();
  records = [...records.filter((other) => other !== twin), record];
  sort();
  const hadFocus = place?.contains(document.activeElement);
  const tile = matches(record) ? tileOf(record) : null;
  if (place) place.replaceWith(...(tile ? [tile] : []));
  if (hadFocus && tile) tile.querySelector(".target").focus();
  refresh();
  try {
    await kept.put(record);
  } catch {
    if (!record.file) toast("This image could not be kept: the browser's storage is full or off.", [["Save it", () => save(record.blob, fileName(record))]]);
  }
  return record;
}

export async function removeRecords(ids) {
  const gone = records.filter(({ id }) => ids.includes(id));
  if (!gone.length) return;
  const focused = document.activeElement?.closest?.(".tile");
  const next = focused && ids.includes(focused.dataset.id) ? focused.nextElementSibling ?? focused.previousElementSibling : null;
  records = records.filter(({ id }) => !ids.includes(id));
  for (const id of ids) {
    selected.delete(id);
    $("tiles").querySelector(`[data-id="${id}"]`)?.remove();
    await kept.delete(id).catch(() => {});
  }
  deleting = Promise.all(inFolder(gone).map((record) => moved(record, deleteImage).catch(() => {})));
  refresh();
  (next?.querySelector(".target") ?? (focused ? $("history") : null))?.focus();
  deleted = gone;
  const where = inFolder(gone).length ? "moved to the folder “deleted”" : "deleted";
  toast(`${plural(gone.length, "image")} ${where}.`, [["Undo", undoDelete]]);
}

const inFolder = (some) => some.filter(({ file }) => file && hasFolder());

/** The server moves the file of a record, which may have another name then. */
async function moved(record, move) {
  record.file = await move(record.file);
  forgetUrl(record.id);
}

export async function undoDelete() {
  const gone = deleted;
  deleted = [];
  if (!gone.length) return;
  await deleting;
  for (const record of inFolder(gone)) await moved(record, undeleteImage).catch((error) => announce(error.message));
  for (const record of gone) if (record.blob) await kept.put(record).catch(() => {});
  records = [...records, ...gone];
  sort();
  render();
  $("toasts").replaceChildren();
  announce(`${plural(gone.length, "image")} back`);
  $("tiles").querySelector(`[data-id="${gone[0].id}"] .target`)?.focus();
}

export async function toggleFavourite(id) {
  const record = byId(id);
  record.favourite = !record.favourite;
  record.blob ??= await blobOf(record).catch(() => undefined);
  await kept.put(record).catch(() => {}); // it shows once it is kept
  const node = $("tiles").querySelector(`[data-id="${id}"] .favourite`);
  if (node) node.ariaPressed = String(record.favourite);
  announce(record.favourite ? "Added to favourites" : "Removed from favourites");
}

/** Show all tiles anew: after a search, a reload, more of them. */
function render() {
  const found = listed();
  const waiting = [...busy.keys()].filter((tile) => tile.isConnected || !tile.dataset.removed);
  for (const tile of $("tiles").querySelectorAll("[data-id]")) {
    if (!found.slice(0, shown).some(({ id }) => id === tile.dataset.id)) forgetUrl(tile.dataset.id);
  }
  $("tiles").replaceChildren(...waiting, ...found.slice(0, shown).map(tileOf));
  $("older").hidden = found.length <= shown && (older === null || !records.length);
  refresh();
}

function refresh() {
  const any = records.length + busy.size > 0 || Boolean(older);
  const tiles = $("tiles").children.length;
  $("empty").hidden = any || loading;
  document.body.classList.toggle("nothing", !any);
  $("no-match").hidden = !any || tiles > 0;
  const [found, all] = [listed().length, `${records.length}${older === null ? "" : "+"}`];
  $("history-count").textContent = records.length ? (found < records.length ? `${found} of ${all}` : all) : "";
  showSelection();
  if (!$("tiles").querySelector('.target[tabindex="0"]')) setCurrent($("tiles").querySelector(".tile"));
}

function tileOf(record) {
  const picture = el("img", { alt: "", loading: "lazy", decoding: "async", width: record.width, height: record.height });
  show(picture, record);
  crisp(picture, record.kind === "sheet" ? 999 : record.width);
  const open = el("button", { type: "button", className: "open target", tabIndex: -1, onclick: () => actions.open(record.id) }, picture);
  const label = `${record.kind === "sheet" ? "Sheet: " : ""}${record.settings.prompt}`;
  open.setAttribute("aria-label", record.settings.seed === undefined ? label : `${label}, seed ${record.settings.seed}`);
  const favourite = button("heart", "Favourite", () => toggleFavourite(record.id), { className: "icon favourite" });
  favourite.ariaPressed = String(record.favourite);
  const select = button("check", "Select", () => toggleSelected(record.id), { className: "icon select" });
  select.ariaPressed = String(selected.has(record.id));
  for (const node of [favourite, select]) node.tabIndex = -1;
  const tile = el("li", { className: "tile" }, el("div", { className: "frame" }, open, select, favourite),
    el("p", { className: "caption", textContent: label, title: record.settings.prompt, ariaHidden: "true" }));
  tile.dataset.id = record.id;
  tile.classList.toggle("selected", selected.has(record.id));
  return tile;
}

// ---- what is being drawn

/** A tile of an image that is not there yet. `task` has status, message, cancel(); `again` asks for it once more. */
export function addBusy(task, index, label) {
  const picture = el("img", { alt: "", hidden: true });
  const bar = el("progress", { max: 1, value: 0, ariaLabel: `Progress: ${label}` });
  const status = el("p", { className: "status" });
  const cancel = button("close", "Cancel", () => task.cancel(), { className: "icon cancel target" });
  const again = button("refresh", "Try again", () => (task.over ? actions.again(task, tile) : task.retry()), { text: true, className: "quiet again" });
  const remove = button("close", "Remove", () => removeBusy(tile), { className: "icon remove" });
  again.hidden = remove.hidden = true;
  const tile = el("li", { className: "tile busy" },
    el("div", { className: "frame" }, el("div", { className: "waiting-art" }), picture, el("div", { className: "shade" }, status, again), bar, cancel, remove),
    el("p", { className: "caption", textContent: label, title: label }));
  busy.set(tile, { task, index });
  $("tiles").prepend(tile);
  refresh();
  return tile;
}

export function removeBusy(tile) {
  const next = tile.contains(document.activeElement) ? tile.nextElementSibling ?? tile.previousElementSibling : null;
  tile.dataset.removed = "yes";
  busy.delete(tile);
  tile.remove();
  refresh();
  next?.querySelector(".target")?.focus();
}

export const doneBusy = (tile) => busy.delete(tile);

/** What the tile says of its image: step, time left, why it waits, what went wrong. */
export function showBusy(tile, preview = null) {
  const { task, index } = busy.get(tile) ?? {};
  if (!task) return;
  const image = task.images[index];
  const [status, bar, picture] = [tile.querySelector(".status"), tile.querySelector("progress"), tile.querySelector("img")];
  if (preview) {
    picture.src = preview;
    picture.hidden = false;
    picture.onload = () => crisp(picture, picture.naturalWidth);
  }
  const failed = task.status === "failed";
  tile.classList.toggle("failed", failed);
  tile.classList.toggle("waits", task.status === "waiting");
  tile.classList.toggle("drawing", task.status === "running");
  bar.hidden = task.status !== "running";
  bar.value = image.steps ? image.step / image.steps : 0;
  tile.querySelector(".cancel").hidden = failed;
  tile.querySelector(".cancel").classList.toggle("target", !failed);
  tile.querySelector(".again").hidden = !failed && task.status !== "waiting";
  tile.querySelector(".again").classList.toggle("target", failed);
  tile.querySelector(".again span").textContent = failed ? "Try again" : "Try now";
  tile.querySelector(".remove").hidden = !failed;
  status.textContent = textOf(task, image);
  if (!$("tiles").querySelector('.target[tabindex="0"]')) setCurrent(tile);
}

/** What must be done before an image begins: "Compiling, 2 of 5 programs". */
const begins = ({ waitsFor }) => (waitsFor ? waitsFor[0].toUpperCase() + waitsFor.slice(1) : "Waiting");

function textOf(task, image) {
  if (task.status === "failed") return task.message || "Failed.";
  if (task.status === "waiting") {
    if (task.why === "key") return "Waiting for an API key.";
    if (task.why === "gone") return "Waiting for the server.";
    if (task.why === "starting") return `Waiting: ${task.message}`;
    const next = `Next try in ${duration(Math.max(1, (task.retryAt - Date.now()) / 1000))}`;
    return task.why === "full" ? `The queue is full. ${next}.` : `${next}: ${task.message}`;
  }
  if (task.status === "running") {
    const left = task.secondsLeft === null ? "" : `${duration(task.secondsLeft)} left`;
    return image.step ? [`${image.step} / ${image.steps}`, left].filter(Boolean).join(" · ") : begins(task);
  }
  if (task.status === "queued" && task.waitsFor) return begins(task);
  return task.status === "queued" && task.ahead ? `Waiting, ${task.ahead} ahead` : task.status === "queued" ? "Waiting" : "Sending";
}

/** The line above the tiles, and the title of the window. */
export function showQueue() {
  const active = [...tasks].filter((task) => !task.over);
  const missing = active.reduce((sum, task) => sum + task.images.filter(({ done }) => !done).length, 0);
  const left = Math.max(...active.filter(({ secondsLeft }) => secondsLeft !== null).map(({ secondsLeft }) => secondsLeft));
  $("queue").hidden = !active.length;
  const doing = active.find(({ waitsFor }) => waitsFor)?.waitsFor;
  const time = doing ? `: ${doing}` : Number.isFinite(left) && !connection.gone ? `, ${duration(left)} left` : "";
  $("queue-text").textContent = `${plural(missing, "image")} in ${plural(active.length, "job")}${time}`;
  document.title = active.length ? `(${missing}) canvax` : "canvax";
}

setInterval(() => {
  for (const [tile, { task }] of busy) if (task.status === "waiting") showBusy(tile);
}, 1000);

// ---- selection and keys

export function toggleSelected(id) {
  if (!selected.delete(id)) selected.add(id);
  const tile = $("tiles").querySelector(`[data-id="${id}"]`);
  tile?.classList.toggle("selected", selected.has(id));
  if (tile) tile.querySelector(".select").ariaPressed = String(selected.has(id));
  showSelection();
}

export function selectNone() {
  for (const id of [...selected]) toggleSelected(id);
}

function showSelection() {
  $("selection").hidden = !selected.size;
  document.body.classList.toggle("selecting", selected.size > 0);
  $("selection-text").textContent = `${selected.size} selected`;
  $("selection-compare").disabled = selected.size !== 2;
  $("selection-compare").title = selected.size === 2 ? "" : "Select two to compare";
}

function setCurrent(tile) {
  if (!tile) return;
  for (const node of $("tiles").querySelectorAll('[tabindex="0"]')) node.tabIndex = -1;
  for (const node of tile.querySelectorAll("button")) node.tabIndex = 0;
}

export const selectedIds = () => [...selected];

/** The record under the keyboard's focus, if any. */
export const currentId = () => document.activeElement?.closest?.(".tile")?.dataset.id ?? null;

export function focusTiles() {
  const target = $("tiles").querySelector('.target[tabindex="0"]') ?? $("history");
  target.focus();
}

/** The nearest tile above (-1) or below (1) another; the first tile is larger than the rest. */
function above(tiles, tile, sign) {
  const at = tile.getBoundingClientRect();
  const boxes = tiles.map((other) => [other, other.getBoundingClientRect()]);
  const there = boxes.filter(([, box]) => (sign > 0 ? box.top >= at.bottom : box.bottom <= at.top));
  const far = ([, box]) => Math.abs(box.left - at.left) + 4 * Math.abs(sign > 0 ? box.top - at.bottom : box.bottom - at.top);
  return there.sort((a, b) => far(a) - far(b))[0]?.[0] ?? tile;
}

function move(tile, key) {
  const tiles = [...$("tiles").children];
  const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
  const to = by ? tiles[Math.max(0, Math.min(tiles.length - 1, tiles.indexOf(tile) + by))] : above(tiles, tile, key === "ArrowUp" ? -1 : 1);
  setCurrent(to);
  to.querySelector(".target")?.focus();
}

export function prepareGallery() {
  const anew = () => { shown = PAGE; renderAll(); };
  on("search", "input", anew);
  on("favourites", "click", () => {
    $("favourites").ariaPressed = String($("favourites").ariaPressed !== "true");
    anew();
  });
  on("older", "click", () => { shown += PAGE; renderAll(); });
  on("tiles", "keydown", (event) => {
    const tile = event.target.closest(".tile");
    if (tile && /^(Arrow|Home|End)/.test(event.key) && !event.altKey && !event.ctrlKey) {
      event.preventDefault();
      move(tile, event.key);
    }
  });
  on("tiles", "focusin", (event) => setCurrent(event.target.closest(".tile")));
  on("selection-clear", "click", selectNone);
  on("selection-delete", "click", () => removeRecords([...selected]));
  on("selection-save", "click", async () => {
    const chosen = [...selected].map(byId);
    if (chosen.length === 1) return save(await blobOf(chosen[0]), fileName(chosen[0]));
    save(await zipped(chosen.map((record) => [fileName(record), () => blobOf(record)])), "canvax-images.zip");
  });
  on("selection-all", "click", () => {
    for (const { id } of listed()) if (!selected.has(id)) toggleSelected(id);
  });
  on("selection-compare", "click", () => actions.compare(...selected));
}
