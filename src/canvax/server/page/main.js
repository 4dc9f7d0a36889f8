// The page.
import { Gone, Refused, getJson, hasFolder, inspect, key, saveSheet } from "./api.js";
import { adapterNames, adaptersListed, adaptersNow, besideAt, restoreBeside } from "./beside.js";
import * as composer from "./composer.js";
import { compare, prepareCompare } from "./compare.js";
import * as gallery from "./gallery.js";
import { prepareKeys } from "./keys.js";
import { editMask, prepareMask } from "./mask.js";
import { blobOf, fileName, paintedFrom } from "./pictures.js";
import { openSheet, prepareSheet } from "./sheet.js";
import { unfinished } from "./store.js";
import { Task, cancelAll, connection, tasks } from "./tasks.js";
import { $, announce, button, copy, el, link, on, openDialog, plural, prepareDocument, remember, save, setIcon, toast } from "./ui.js";
import * as viewer from "./viewer.js";

// ---- drawing

const narrow = matchMedia("(max-width: 720px)");

/** Scroll to the newest tile, unless it is in view. On a phone the images are below the form. */
function showTiles() {
  if (narrow.matches) document.activeElement?.blur();
  else if ($("tiles").getBoundingClientRect().top >= 0) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $("history").scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
}

async function draw() {
  await composer.whenInputRead();
  await adaptersListed();
  const job = composer.settings();
  if (!job.prompt) return composer.formError("Write a prompt.", "prompt");
  if (!composer.seedIsNumber()) return composer.formError("A seed is a whole number.", "seed");
  const wrong = composer.wrongNumber();
  if (wrong) return composer.formError(wrong.text, null, wrong.id);
  composer.formError("");
  showTiles();
  const files = await composer.inputFiles(job);
  if (!files.image) delete job.strength;
  const task = start(job, files);
  task.addEventListener("accepted", () => composer.showHints(task.hints));
}

/** The settings as they are kept with an image: with what the model's card decided. */
function recorded({ n, previews, ...settings }) {
  const card = composer.cardOf(settings.model);
  return { ...settings, model: settings.model ?? card?.id, sampler: settings.sampler ?? card?.sampler };
}

const isTwoPasses = ({ options }) => options?.hires > 1;

/** Ask for a job and show its images as they grow. */
function start(job, files = {}, kept = {}) {
  if (job.options && !files.mask) job = { ...job, options: composer.maskless(job.options) };
  const task = new Task(job, files, kept);
  const tiles = [...task.images].reverse().map(({ index }) => gallery.addBusy(task, index, job.prompt)).reverse();
  const showAll = () => {
    for (const tile of tiles) gallery.showBusy(tile);
    gallery.showQueue();
  };
  task.addEventListener("change", () => { showAll(); tellChange(task); });
  task.addEventListener("progress", ({ detail: { index } }) => {
    gallery.showBusy(tiles[index], task.images[index].preview);
    gallery.showQueue();
  });
  task.addEventListener("image", ({ detail: { index, blob } }) => {
    const { seed, width, height, file } = task.images[index];
    gallery.doneBusy(tiles[index]);
    composer.usedSeed(seed - index);
    const settings = { ...recorded(job), seed, ...(isTwoPasses(job) ? {} : { width, height }) };
    gallery.addRecord({ id: `${task.once}-${index}`, created: task.created - index * 0.001, settings, inputs: files, blob, file, width, height }, tiles[index]);
    gallery.showQueue();
  });
  task.addEventListener("kept", ({ detail: { index } }) => { if (tiles[index].isConnected) gallery.removeBusy(tiles[index]); });
  task.addEventListener("refused", ({ detail: error }) => {
    if (task.id) return;
    for (const tile of tiles) gallery.removeBusy(tile);
    composer.formError(error.message, error.param);
    if (document.querySelector("dialog[open]")) toast(error.message);  // which hides the form
  });
  tasks.add(task);
  showAll();
  task.run(() => composer.bodyOf(job, files)).then(() => over(task, tiles));
  return task;
}

function over(task, tiles) {
  tasks.delete(task);
  for (const tile of tiles.filter((tile, i) => !task.images[i].done && !tile.dataset.removed)) {
    if (task.status === "cancelled") gallery.removeBusy(tile);
    else gallery.showBusy(tile);
  }
  gallery.showQueue();
}

function tellChange(task) {
  if (task.status === "queued" && task.ahead) announce(`Waiting, ${plural(task.ahead, "image")} ahead`);
  if (task.status === "running") announce("Generating");
  if (task.status === "done") announce(`${plural(task.images.length, "image")} done`);
  if (task.status === "cancelled") announce("Cancelled");
  if (task.status === "failed") announce(`Failed: ${task.message}`);
  if (task.status !== "waiting") return;
  if (task.why === "key") askKey(task.message);
  else if (task.why === "later") announce(`Trying again: ${task.message}`);
  else if (task.why === "starting") announce(`Waiting: ${task.message}`);
  else announce(task.why === "full" ? "The queue is full. Trying again." : "The server does not answer. Trying again.");
}

async function beginSheet(sheet) {
  const tile = gallery.addBusy(sheet, 0, `Sheet: ${sheet.base.prompt}`);
  const picture = tile.querySelector("img");
  picture.replaceWith(sheet.canvas);
  tile.append(picture);
  const changed = () => {
    gallery.showBusy(tile);
    gallery.showQueue();
    if (sheet.status === "waiting" && sheet.why === "key") askKey(sheet.message);
  };
  changed();
  const blob = await sheet.run(changed);
  gallery.showQueue();
  if (sheet.status === "cancelled") return gallery.removeBusy(tile);
  if (!blob) return gallery.showBusy(tile);
  gallery.doneBusy(tile);
  const { width, height } = sheet.canvas;
  const saved = hasFolder() && sheet.saved;
  const file = saved ? await saveSheet(saved).catch((error) => toast(`The sheet is in this browser alone: ${error.message}`)) : undefined;
  await gallery.addRecord({ kind: "sheet", created: sheet.created, settings: sheet.settings, blob, file, width, height }, tile);
  announce("The sheet is done");
}

// ---- what can be done with an image

/** Settings that draw it once more; what was upscaled has the size of its input, so many times. */
function anew({ inputs, settings: { width, height, upscale, ...settings } }) {
  if (!inputs?.image) delete settings.strength;
  const model = composer.knows(settings.model) ? settings.model : undefined;
  const size = upscale ? { upscale } : { width, height };
  return { ...settings, ...size, model, sampler: settings.sampler ?? undefined, n: 1, previews: true, seed: undefined };
}

/** Those of an image itself, without what made it larger. */
function onePass({ settings, width, height }) {
  const { outpaint, ...options } = settings.options ?? {};
  if (isTwoPasses(settings)) settings = { ...settings, width, height };
  for (const name in options) if (name.startsWith("hires")) delete options[name];
  return { ...settings, options };
}

/** The settings of the image before it was upscaled; where they are not kept, no seed of it is known. */
function sourceOf({ settings, width, height }) {
  const { source, upscale, strength, seed, ...rest } = settings;
  if (!upscale) return settings;
  return source ?? { ...rest, width: Math.round(width / upscale), height: Math.round(height / upscale) };
}

const closeDialogs = () => { for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close(); };
const canDo = (task) => composer.model()?.tasks.includes(task) ?? false;

/** Tiles have the model's own size. */
const canUpscale = () => canDo("upscaling") && composer.canMake(...composer.model().native);

Object.assign(viewer.viewerActions, {
  canUpscale,
  vary(record) {
    if (record.missing?.length) return toast(`The file of this image does not hold its ${record.missing[0]}, so it cannot be made again.`);
    if (record.settings.upscale && !record.inputs?.image) return toast("The image that was upscaled is not kept.");
    closeDialogs();
    start(anew(record), record.inputs);
  },
  async varyLittle(record) {
    if (!canDo("image-to-image")) return toast("This model cannot start from images.");
    closeDialogs();
    const image = await blobOf(record);
    const changed = { ...anew({ ...record, settings: onePass(record) }), strength: 0.4 };
    if (changed.upscale) changed.upscale = 1;  // it is as large as it should be
    const { mask, references, ...inputs } = record.inputs ?? {};
    start(changed, { ...inputs, image });
  },
  async upscale(record) {
    if (!canUpscale()) return toast("This server has no programs for the size of this model's tiles.");
    closeDialogs();
    const inputs = { image: await blobOf(record) };
    start({ ...anew({ inputs, settings: { ...onePass(record), ...composer.upscaling() } }), source: sourceOf(record) }, inputs);
  },
  async use(record) {
    closeDialogs();
    if (composer.editing()) await composer.takeReferences([await blobOf(record)]);
    else {
      await useAsInput(record);
      tellPrompt(record);
    }
    $("prompt").focus();
  },
  async mask(record) {
    closeDialogs();
    const back = composer.snapshot();
    await useAsInput(record);
    openMask(back, record);
  },
  compare(record) {
    const two = gallery.selectedIds();
    if (two.length === 2 && !viewer.viewed()) return comparePair(...two);
    if (record.kind === "sheet") return toast("A sheet cannot be compared.");
    const all = gallery.listed().filter(({ kind }) => kind !== "sheet");
    const place = all.findIndex(({ id }) => id === record.id);
    const other = all[place + 1] ?? all[place - 1];
    if (!other) return toast("There is no other image yet.");
    compare(other, record);
  },
  async restore(record) {
    closeDialogs();
    const { inputs, settings: { upscale, strength } } = record;
    const settings = tidied(sourceOf(record), record.missing);
    await restored({ ...settings, lock: settings.seed !== undefined }, upscale ? {} : inputs);
    if (upscale) composer.apply({ upscale, strength });
    tellLost(settings, record.missing, upscale && inputs?.image ? [["Upscale again", () => viewer.viewerActions.vary(record)]] : [], upscale);
  },
});

/** The form becomes these settings and inputs, without what they do not say. */
async function restored(settings, { image = null, mask, references = [], ...beside } = {}) {
  if (mask) $("mask-soft").checked = $("mask-only").checked = false;  // the options say it
  await composer.setInput(image, mask ? await paintedFrom(mask) : null, references);
  $("style").value = "";  // the prompt says it
  await composer.apply({ adapters: {}, options: {}, vae: "", ...settings });
  await restoreBeside(beside, settings);
  composer.keepDraft();
  $("prompt").focus();
}

/** With the prompt of the image, unless one was typed. */
async function useAsInput(record) {
  await composer.setInput(await blobOf(record));
  if (!composer.isTyped()) takePrompt(record);
}

function takePrompt({ settings: { prompt, negative_prompt } }) {
  if (prompt) composer.apply({ prompt, negative_prompt });
  composer.keepDraft();
}

function tellPrompt(record) {
  const { prompt } = record.settings;
  if (!prompt || prompt === $("prompt").value.trim()) return announce("Added as input image");
  toast("Added as input image. Your prompt stays.", [["Use the image's prompt", () => takePrompt(record)]]);
}

function comparePair(...ids) {
  const pair = ids.map(gallery.byId);
  if (pair.some(({ kind }) => kind === "sheet")) return toast("A sheet cannot be compared.");
  compare(...pair);
}

/** `record`: the image, where it was made the input for this mask. */
async function openMask(back, record) {
  const input = composer.currentInput();
  if (!input) return;
  editMask(...await composer.fittedInput(), async (mask) => {
    await composer.setInput(input.original, mask);
    composer.keepDraft();
    if (record) tellPrompt(record);
    $("prompt").focus();
  }, back);
}

const act = (name) => (id) => viewer.viewerActions[name](gallery.byId(id));
const unlessSheet = (action) => (id) => (gallery.byId(id).kind === "sheet" ? toast("A sheet does not have this action.") : action(id));

function remove(id) {
  if (viewer.viewed()) viewer.remove();
  else gallery.removeRecords([id]);
}

const onImage = {
  Delete: remove,
  Backspace: remove,
  f: async (id) => { await gallery.toggleFavourite(id); if (viewer.viewed()) viewer.view(id); },
  x: gallery.toggleSelected,
  v: unlessSheet(act("vary")), V: unlessSheet(act("varyLittle")), u: unlessSheet(act("use")), p: unlessSheet(act("mask")),
  e: unlessSheet(act("upscale")), c: act("compare"), r: unlessSheet(act("restore")),
  d: async (id) => save(await blobOf(gallery.byId(id)), fileName(gallery.byId(id))),
};

// ---- files

async function openImage(file) {
  if (!file.type.startsWith("image/")) return toast("That is no image.");
  const asInput = async () => {
    if (composer.editing()) return composer.takeReferences([file]);
    try {
      await composer.setInput(file);
    } catch {
      toast("This browser cannot read that image.");
      return false;
    }
    toast("Added as input image.");
    return true;
  };
  try {
    const { settings: recorded, missing, metadata } = await inspect(file);
    const settings = tidied({ ...recorded, prompt: recorded.prompt ?? metadata.upscale?.prompt }, missing);
    const { image, mask, ...rest } = settings;
    if (rest.upscale) Object.assign(rest, { seed: undefined, width: Math.round(metadata.width / rest.upscale), height: Math.round(metadata.height / rest.upscale) });
    await restored({ ...rest, n: 1, lock: rest.seed !== undefined });
    tellLost(settings, missing, [["Add as input too", asInput]]);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return askKey(error.message);
    const wanted = composer.editing() || canDo("image-to-image");
    if ((wanted && !await asInput()) || !(error instanceof Refused)) return;
    const why = error.code === "no_settings" ? "It holds no settings." : error.message;
    toast(wanted ? `Added as input image. ${why}` : why);
  }
}

/** List the settings that the form lacks, with the nearest choices. */
function tellLost(settings, missing = [], actions = [], upscale = settings.upscale) {
  const rest = missing.filter((text) => !LORA.test(text));
  const pairs = missing.map((text) => text.match(LORA)).filter((tag) => tag?.[2].includes(":"));
  for (const [, name, weight] of pairs) if (adapterNames().includes(name)) useAdapter(name, weight);
  const adapters = [...Object.entries(settings.adapters ?? {}).map(([name, weight]) => [`the adapter ${name}`, name, weight]), ...pairs];
  let [close, first] = [() => {}, null];
  const tell = (note = "") => {
    const left = [...composer.notTaken(settings), ...lostAdapters(adapters)];
    first ??= new Set(left.map(({ setting }) => setting));
    const still = left.filter(({ setting }) => first.has(setting));
    const offers = still.flatMap(({ choices = {} }) => Object.entries(choices)).map(([label, act]) => [label, async () => {
      const changed = await act();
      await adaptersListed();
      tell(changed);
    }]);
    const lost = [...still.map(({ text }) => text), ...rest];
    close();
    if (!lost.length && !actions.length && !upscale && !note) return announce("Settings restored");
    const shown = [...lost.slice(0, 8), ...(lost.length > 8 ? [`${lost.length - 8} more`] : [])].join(", ");
    const what = `Settings restored${upscale ? ` of the image before it was upscaled ${upscale} ×` : ""}${shown && `, without ${shown}`}.`;
    close = toast(note ? `${what} ${note}` : what, [...offers, ...actions], lost.length || note ? 60 : 8);
  };
  tell();
}

/** With the LoRAs that were taken out of the prompt as adapters, and the prompt without the commas that they leave. */
function tidied(settings, missing = []) {
  const tags = missing.map((text) => text.match(LORA)).filter(Boolean);
  if (!tags.length) return settings;
  const adapters = Object.fromEntries(tags.filter(([, , weight]) => !weight.includes(":")).map(([, name, weight]) => [name, Number(weight || 1)]));
  return { ...settings, adapters: { ...settings.adapters, ...adapters }, prompt: settings.prompt?.replace(/\s*,(\s*,)+/g, ",").replace(/^[\s,]+|[\s,]+$/g, "") };
}

const LORA = /^<lora:([^:<>]+):?([\d.:-]*)[^<>]*>$/;

/** Two weights, a text, go into the prompt. */
async function useAdapter(name, weight) {
  const prompt = `${$("prompt").value} <lora:${name}:${weight}>`.trim();
  await composer.apply(typeof weight === "string" ? { prompt, negative_prompt: $("negative").value } : { adapters: { ...adaptersNow(), [name]: weight } });
  composer.keepDraft();
}

/** The adapters, [text, name, weight], that the form lacks, with those of their names. */
function lostAdapters(adapters) {
  const meant = (name) => composer.meant(name, adapterNames());
  return adapters.filter(([, name]) => !meant(name).some((one) => one in adaptersNow() || $("prompt").value.includes(`<lora:${one}:`))).map(([text, name, weight]) => ({
    setting: `adapter ${name}`, text: `${text}${meant(name).length > 1 ? ` (${meant(name).length} files have this name)` : ""}`,
    choices: Object.fromEntries(meant(name).slice(0, 3).map((one) => [`Use ${one}`, () => useAdapter(one, weight)])),
  }));
}

/** Where it was dropped or pasted decides what it is for. */
function takeFiles(event, files) {
  const beside = besideAt(event);
  if (event.target.closest?.("#input") && composer.editing()) return composer.takeReferences(files);
  return beside ? beside.take(files[0]) : openImage(files[0]);
}

function prepareFiles() {
  let depth = 0;
  let ours = false;
  addEventListener("dragstart", () => { ours = true; });
  addEventListener("dragend", () => { ours = false; });
  const show = (by) => { depth = Math.max(0, depth + by); $("drop").hidden = !depth; };
  const holdsFile = (event) => !ours && event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => { if (holdsFile(event)) show(1); });
  addEventListener("dragleave", (event) => { if (holdsFile(event)) show(-1); });
  addEventListener("dragover", (event) => { if (holdsFile(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    if (!holdsFile(event)) return;
    event.preventDefault();
    show(-depth);
    takeFiles(event, [...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (file) { event.preventDefault(); takeFiles(event, [file]); }
  });
  on("open-file", "click", () => $("file").click());
  on("file", "change", () => {
    if ($("file").files[0]) openImage($("file").files[0]);
    $("file").value = "";
  });
}

// ---- the server, its key, the theme

/** Files in the folder of models that cannot be used, below the models. */
async function showLeftOut() {
  if (!hasFolder()) return;
  const { files } = await getJson("api/left-out").catch(() => ({ files: [] }));
  $("left-out").hidden = !files.length;
  $("left-out-text").textContent = `${plural(files.length, "file")} cannot be used`;
  $("left-out-list").replaceChildren(...files.flatMap(({ name, why }) => [el("dt", { textContent: name }), el("dd", { textContent: why })]));
  if (files.length) $("model-field").hidden = false;
}

async function loadModels() {
  try {
    const catalogue = await getJson("api/models");
    await composer.setCatalogue(catalogue);
    untilReady(catalogue);
    await showLeftOut();
    const examples = composer.model()?.examples ?? [];
    $("examples-text").hidden = !examples.length;
    $("examples").replaceChildren(...examples.slice(0, 8).map((text) => el("li", {}, link(text, () => composer.takePrompt(text), ""))));
  } catch (error) {
    if (error instanceof Gone) connection.lost();
    else if (error.status === 401) askKey(error.message);
    else if (error.code === "starting") return startingSoon(error);
    else toast(error.message);
    $("starting").hidden = true;
  }
}

/** Say for a moment how far a server is that is not ready. */
function showStarting(text, seconds = 2) {
  $("starting").textContent = `Getting ready: ${text}`;
  $("starting").hidden = false;
  return new Promise((resolve) => { setTimeout(resolve, 1000 * Math.min(2, seconds)); });
}

/** The models are not known yet. */
const startingSoon = ({ message, retryAfter }) => showStarting(message, retryAfter ?? 2).then(loadModels);

/** The models can be chosen; jobs wait until the first of them is loaded. */
async function untilReady({ starting }) {
  for (let text = starting; text; text = (await getJson("api/models").catch(() => ({}))).starting) await showStarting(text);
  $("starting").hidden = true;
}

function askKey(text = "") {
  $("key-error").textContent = key.get() ? text : "";
  if ($("key").open) return;
  $("key-text").textContent = text && !key.get() ? "This server needs a key. It is stored in this browser." : "Stored in this browser and sent only to this server.";
  $("key-value").value = key.get();
  openDialog($("key"));
  $("key-value").focus();
}

function prepareKey() {
  const tryAgain = async () => {
    $("key").close();
    if (!composer.hasModels()) await loadModels();
    await gallery.renderAll();
    for (const task of tasks) if (task.why === "key") task.retry();
  };
  on("key-form", "submit", (event) => {
    event.preventDefault();
    key.set($("key-value").value.trim());
    tryAgain();
  });
  on("key-forget", "click", () => { key.set(""); $("key-value").value = ""; $("key").close(); });
  on("open-key", "click", () => askKey());
  for (const id of ["open-other-models", "about-model"]) on(id, "click", () => openDialog($("other-models")));
  for (const code of document.querySelectorAll(".commands code")) code.after(button("copy", `Copy ${code.textContent}`, () => copy(code.textContent)));
}

function prepareConnection() {
  const show = () => {
    $("banner").hidden = !connection.gone;
    const seconds = Math.max(0, Math.ceil((connection.retryAt - Date.now()) / 1000));
    if (connection.gone) $("banner-text").textContent = `The server does not answer. ${seconds ? `Next try in ${seconds} s.` : "Trying…"}`;
  };
  let before = false;
  connection.addEventListener("change", () => {
    show();
    if (connection.gone && !before) announce("The server does not answer. Your text is kept. Trying again.");
    if (!connection.gone && before) {
      announce("The server is back");
      if (!composer.hasModels()) loadModels();
      gallery.renderAll();
    }
    before = connection.gone;
  });
  on("banner-retry", "click", () => connection.now());
  setInterval(show, 500);
  setInterval(() => { if (!document.hidden && !connection.gone) connection.check(); }, 15_000);
}

const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function showTheme() {
  setIcon($("open-theme"), isDark() ? "sun" : "moon");
  $("open-theme").ariaLabel = $("open-theme").title = isDark() ? "Light theme" : "Dark theme";
}

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  showTheme();
}

function prepareForm() {
  composer.prepareComposer();
  on("composer", "submit", (event) => { event.preventDefault(); draw(); });
  for (const id of ["prompt", "negative"]) {
    on(id, "keydown", (event) => {
      if (event.defaultPrevented || event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.isComposing) return;
      event.preventDefault();
      draw();
    });
  }
  $("fold").open = !narrow.matches;
  narrow.addEventListener("change", () => { $("fold").open = !narrow.matches; });
  on("input-mask", "click", () => openMask());
  on("input-open", "click", () => (composer.currentInput() ? openMask() : $("input-file").click()));
  on("queue-cancel", "click", cancelAll);
  on("open-sheet", "click", openSheet);
  on("open-theme", "click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
}

function prepareActions() {
  Object.assign(gallery.actions, {
    open: viewer.view,
    compare: comparePair,
    again(task, tile) {
      gallery.removeBusy(tile);
      if (task.again instanceof Function) return beginSheet(task.again());
      start({ ...task.settings, n: 1, seed: task.images.length > 1 ? undefined : task.settings.seed }, task.inputs);
    },
  });
  prepareKeys({
    draw, onImage, current: () => viewer.viewed()?.id ?? gallery.currentId(),
    global: {
      h: gallery.focusTiles, z: gallery.undoDelete, l: () => composer.toggleLock(), i: () => $("file").click(), m: openSheet, t: switchTheme,
      Escape: gallery.selectNone,
    },
  });
}

const left = unfinished.all().catch(() => []);  // before this visit's jobs are among them
prepareDocument();
prepareForm();
prepareFiles();
prepareKey();
prepareConnection();
prepareMask();
prepareCompare();
viewer.prepareViewer();
gallery.prepareGallery();
prepareSheet(beginSheet);
prepareActions();
showTheme();
await gallery.loadImages();
await loadModels();
for (const { settings, inputs, ...kept } of await left) start(settings, inputs, kept);
document.body.dataset.ready = "yes";
