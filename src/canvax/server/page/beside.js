// Beside the prompt: adapters, a control image, an image prompt.
import { controlImage, getJson } from "./api.js";
import { paintRange, sizeNow } from "./composer.js";
import { fitted, paint, within } from "./pictures.js";
import { $, button, choice, el, on, toast } from "./ui.js";
import { offerWords } from "./words.js";

/** What is sent of an image prompt: CLIP looks at a few hundred pixels of it. */
const PROMPT_SIDE = 1024;

/** Longer side of a control image as it is shown: thin edges stay visible. */
const SHOWN_SIDE = 320;

let card = null;
/** Resolved once the adapters of the chosen model are listed. */
let listing = Promise.resolve();
/** Adapters by name: the words and settings that they were trained with. */
let known = {};

const rows = () => [...$("adapter-list").children];
const changed = () => $("adapter-list").dispatchEvent(new Event("input", { bubbles: true }));
export const optionsOf = (nets) => nets.map(({ name, alias = name, fault = "" }) => el("option", { value: name, textContent: fault ? `${name} (cannot be used)` : alias === name ? name : `${name} (${alias})`, title: fault, disabled: Boolean(fault) }));

/** An image beside the prompt, the network that reads it, and how strongly. */
class Beside {
  given = null;

  constructor(id, title) { Object.assign(this, { id, title }); }

  /** A blob; null if there is none, or nothing here to read it. */
  get image() { return this.nets.length ? this.given : null; }

  part(name) { return $(`${this.id}-${name}`); }

  /** The networks of the start, then those of the folder. `fault`: why one cannot be used. */
  get listed() {
    const { controls = [], controlnets = [], ip_adapters = [] } = card ?? {};
    if (this.id !== "control") return ip_adapters.map((name) => ({ name }));
    const others = controlnets.filter(({ name }) => controls.every((net) => net.name !== name));
    return [...controls, ...others.map((net) => ({ ...net, named: true }))];
  }

  get nets() { return this.listed.filter(({ fault }) => !fault); }

  get net() { return this.nets.find(({ name }) => name === this.part("network").value) ?? this.nets[0]; }

  /** What is kept of it with an image. */
  get settings() {
    const type = this.net.types?.length ? { type: $("control-type").value } : {};
    const from = this.id === "control" && $("control-from").value ? { from: $("control-from").value } : {};
    return { network: this.net.name, scale: Number.parseFloat(this.part("scale").value), ...type, ...from };
  }

  /** The networks of another model. */
  offer() {
    const before = this.part("network").value;
    $(this.id).hidden = !this.nets.length;
    this.part("network").replaceChildren(...optionsOf(this.listed));
    this.choose(before);
    this.part("network-field").hidden = this.listed.length < 2 && !this.net?.named;
    this.showTypes();
  }

  /** Whether there is a network of this name, which is chosen then. */
  choose(name) {
    const is = this.nets.some((net) => net.name === name);
    if (is) this.part("network").value = name;
    return is;
  }

  /** An image that this browser cannot read changes nothing. */
  async set(blob, { network, type, scale, from = "" } = {}) {
    const bitmap = blob && await createImageBitmap(blob);
    this.given = blob;
    if (network && !this.choose(network)) toast(`${network} is not here: ${this.net?.name ?? "no network"} is used.`);
    this.showTypes();
    if (type) $("control-type").value = type;
    if (scale !== undefined) this.part("scale").value = scale;
    if (this.id === "control" && network) $("control-from").value = from;
    paint(this.part("canvas"), bitmap);
    this.part("remove").hidden = !blob;
    this.part("title").textContent = blob ? this.title : "Choose an image, or drop it here";
    if (blob) $(this.id).open = true;
    showBesideText();
    if (this.id === "control") showPrepared();
  }

  showTypes() {
    if (this.id !== "control") return;
    const types = this.net?.types ?? [];
    const before = $("control-type").value;
    $("control-type").replaceChildren(...optionsOf(types.map((name) => ({ name }))));
    if (types.includes(before)) $("control-type").value = before;
    $("control-type-field").hidden = !types.length;
  }

  showText() {
    this.part("scale-out").textContent = Number.parseFloat(this.part("scale").value).toFixed(2);
    paintRange(this.part("scale"));
    const { type, network, scale } = this.image ? this.settings : {};
    this.part("text").textContent = this.image ? `${type ?? network} ${scale}` : "";
  }

  async take(file) {
    if (!file?.type.startsWith("image/")) return toast("That is no image.");
    await this.set(file).then(changed, () => toast("This browser cannot read that image."));
  }

  prepare() {
    const file = this.part("file");
    for (const name of ["open", "choose"]) this.part(name).addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      if (file.files[0]) this.take(file.files[0]);
      file.value = "";
    });
    this.part("network").addEventListener("change", () => { this.showTypes(); showBesideText(); });
    this.part("remove").addEventListener("click", () => { this.set(null).then(changed); this.part("open").focus(); });
  }
}

const control = new Beside("control", "Control image");
const prompted = new Beside("image-prompt", "Image prompt");
const images = [control, prompted];

let prepared = 0;

/** The control image as the network will see it, where the server prepares it. */
export async function showPrepared() {
  const [turn, kind] = [++prepared, $("control-from").value];
  $("control-prepared-text").textContent = "Preparing…";
  $("control-prepared").hidden = !(control.image && kind);
  if ($("control-prepared").hidden) return;
  let text = "What the network sees";
  const made = await fitted(control.image, ...sizeNow())
    .then((blob) => controlImage(kind, blob)).then((blob) => within(blob, SHOWN_SIDE)).then(createImageBitmap).catch((error) => { text = error.message; });
  if (turn !== prepared) return;
  paint($("control-prepared-canvas"), made);
  $("control-prepared-text").textContent = text;
}

/** The one whose fields an event was in, or undefined. */
export const besideAt = ({ target }) => images.find(({ id }) => target.closest?.(`#${id}`));

/** The adapters and networks of a model, by its card. */
export function showBeside(model) {
  card = model;
  for (const one of images) one.offer();
  showBesideText();
  showPrepared();
  listing = listAdapters(model);
}

export const adaptersListed = () => listing;

async function listAdapters(model) {
  const { adapters, embeddings = [] } = await getJson(`api/adapters?model=${encodeURIComponent(model.id)}`).catch(() => ({ adapters: [] }));
  if (card !== model) return;
  offerWords(embeddings);
  $("adapter-add").replaceChildren(choice("", "Add an adapter…"), ...optionsOf(adapters));
  known = Object.fromEntries(adapters.filter(({ fault }) => !fault).map((one) => [one.name, one]));
  $("adapters").hidden = !adapters.length;
  showAdapters(adaptersNow());
}

/** What its file says of its use. */
function hintOf({ trigger_words: words = [], suggested = {}, without_effect: other = {} }) {
  const settings = (of) => Object.entries(of).map(([name, value]) => `${name.replace("num_inference_", "").replaceAll("_", " ")} ${value}`).join(", ");
  const parts = [["Trained with", words.slice(0, 5).join(", ")], ["Made for", settings(suggested)], ["Trained with, but not sampled with", settings(other)]];
  return parts.filter(([, text]) => text).map(([start, text]) => `${start} ${text}.`).join(" ");
}

function addAdapter(name, weight = 1) {
  const id = `adapter-${name}`;
  const value = typeof weight === "number" ? weight : weight.unet ?? 1;
  const input = el("input", { type: "number", id, className: "bare", step: 0.05, min: -10, max: 10, value, inputMode: "decimal" });
  const remove = button("close", `Remove ${name}`, () => {
    row.remove();
    $("adapter-add").focus();
    changed();
  });
  const label = el("label", { htmlFor: id, textContent: name }, el("span", { className: "hidden", textContent: " weight" }));
  const row = el("li", {}, el("div", { className: "pair" }, label, el("div", { className: "row tight" }, input, remove)), el("p", { className: "hints", textContent: hintOf(known[name]) }));
  row.dataset.name = name;
  $("adapter-list").append(row);
  return input;
}

/** Weights by name, once the model's adapters are listed, unless another model is chosen meanwhile. */
export async function setAdapters(weights) {
  const mine = listing;
  await mine;
  if (mine === listing) showAdapters(weights);
}

/** Those of adapters that are not there are left out. */
function showAdapters(weights) {
  $("adapter-list").replaceChildren();
  for (const [name, weight] of Object.entries(weights)) if (Object.hasOwn(known, name)) addAdapter(name, weight);
  showBesideText();
}

export const adaptersNow = () => Object.fromEntries(rows().map((row) => [row.dataset.name, Number.parseFloat(row.querySelector("input").value) || 0]));

/** What of it is said in a job; `steered` and `prompted` say how the images are read, for `besideBody`. */
export function besideSettings() {
  const result = rows().length ? { adapters: adaptersNow() } : {};
  if (control.image) result.steered = control.settings;
  if (prompted.image) result.prompted = prompted.settings;
  return result;
}

/** The images as they were given. */
export const besideImages = () => ({ control: control.given, image_prompt: prompted.given });

/** The images as files for a job of this size: {} without any. */
export async function besideFiles({ width, height }) {
  const files = {};
  if (control.image) files.control = await fitted(control.image, width, height);
  if (prompted.image) files.image_prompt = await within(prompted.image, PROMPT_SIDE);
  return files;
}

/** Fields of the request, of its images as they are sent. */
export function besideBody({ steered, prompted: reading }, { control: seen, image_prompt: image }) {
  const body = {};
  if (seen) {
    const shown = steered.type ? { [steered.type]: seen } : seen;
    const all = control.nets.filter(({ named }) => !named).map(({ name }) => (name === steered.network ? shown : null));
    const named = all.every((image) => !image);
    Object.assign(body, { control: all.length > 1 && !named ? all : shown, control_scale: steered.scale });
    if (named) body.controlnet = steered.network;
    if (steered.from) body.control_from = steered.from;
  }
  if (image) {
    const adapter = Math.max(0, prompted.nets.findIndex(({ name }) => name === reading.network));
    body.image_prompt = { image, scale: reading.scale, adapter };
  }
  return body;
}

/** The images that were kept with a finished one, and what was said of them. */
export async function restoreBeside({ control: seen = null, image_prompt: image = null }, settings) {
  await control.set(seen, settings.steered);
  await prompted.set(image, settings.prompted);
}

/** The names of the adapters that the prompt may have. */
export const adapterNames = () => Object.keys(known);

/** What stands in the folded parts, in a line each. */
export function showBesideText() {
  $("adapters-text").textContent = rows().map((row) => `${row.dataset.name} ${row.querySelector("input").value}`).join(", ");
  for (const one of images) one.showText();
}

export function prepareBeside() {
  on("adapter-add", "change", () => {
    const name = $("adapter-add").value;
    $("adapter-add").value = "";
    if (name) ($(`adapter-${name}`) ?? addAdapter(name)).focus();
    changed();
  });
  const head = $("control-head").cloneNode(true);
  for (const node of [head, ...head.querySelectorAll("[id]")]) node.id = node.id.replace("control", "image-prompt");
  $("image-prompt").querySelector("summary").after(head);
  for (const one of images) one.prepare();
  on("control-from", "change", showPrepared);
}
