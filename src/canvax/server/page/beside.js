// What goes beside the prompt: adapters with their weights, and a control image.
import { getJson } from "./api.js";
import { paintRange } from "./composer.js";
import { fitted } from "./pictures.js";
import { $, button, el, toast } from "./ui.js";

let card = null;
/** The control image as it was given: a blob or null. */
let control = null;

const rows = () => [...$("adapter-list").children];
const changed = () => $("adapter-list").dispatchEvent(new Event("input", { bubbles: true }));
const optionsOf = (names) => names.map((name) => el("option", { value: name, textContent: name }));
const network = () => card?.controls?.find(({ name }) => name === $("control-network").value) ?? card?.controls?.[0];

/** The adapters and networks of a model, by its card. */
export async function showBeside(model) {
  card = model;
  const nets = card.controls ?? [];
  $("control").hidden = !nets.length;
  if (!nets.length) control = null;
  $("control-network").replaceChildren(...optionsOf(nets.map(({ name }) => name)));
  $("control-network-field").hidden = nets.length < 2;
  showNetwork();
  const { adapters } = await getJson(`api/adapters?model=${encodeURIComponent(card.id)}`).catch(() => ({ adapters: [] }));
  if (card !== model) return;
  const named = ({ name, alias }) => el("option", { value: name, textContent: alias === name ? name : `${name} (${alias})` });
  $("adapter-add").replaceChildren(el("option", { value: "", textContent: "Add an adapter…" }), ...adapters.map(named));
  $("adapters").hidden = !adapters.length;
  setAdapters(adaptersNow());
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
  const row = el("li", { className: "pair" }, label, el("div", { className: "row tight" }, input, remove));
  row.dataset.name = name;
  $("adapter-list").append(row);
  return input;
}

/** Weights by name; those of adapters that are not there are left out. */
export function setAdapters(weights) {
  const known = new Set([...$("adapter-add").options].map(({ value }) => value));
  $("adapter-list").replaceChildren();
  for (const [name, weight] of Object.entries(weights)) if (known.has(name)) addAdapter(name, weight);
  showBesideText();
}

const adaptersNow = () => Object.fromEntries(rows().map((row) => [row.dataset.name, Number.parseFloat(row.querySelector("input").value) || 0]));

/** What of it is said in a job, with `steered`: which network sees the control image, as what, and how strongly. */
export function besideSettings() {
  const result = {};
  if (rows().length) result.adapters = adaptersNow();
  if (control) {
    result.steered = { network: network().name, scale: Number.parseFloat($("control-scale").value) };
    if (network().types.length) result.steered.type = $("control-type").value;
  }
  return result;
}

/** The control image as a file for a job of this size: {} without one. */
export const controlFiles = async ({ width, height }) => (control ? { control: await fitted(control, width, height) } : {});

/** Fields of the request. */
export function steeredBody({ network: name, type, scale }, image) {
  const nets = card.controls ?? [];
  const shown = type ? { [type]: image } : image;
  const all = nets.map((net) => (net.name === name ? shown : null));
  return { control: nets.length > 1 ? all : shown, control_scale: scale };
}

export async function setControl(blob, steered = {}) {
  control = blob;
  if (steered.network) $("control-network").value = steered.network;
  showNetwork();
  if (steered.type) $("control-type").value = steered.type;
  if (steered.scale !== undefined) $("control-scale").value = steered.scale;
  await showControl();
}

function showNetwork() {
  const types = network()?.types ?? [];
  const before = $("control-type").value;
  $("control-type").replaceChildren(...optionsOf(types));
  if (types.includes(before)) $("control-type").value = before;
  $("control-type-field").hidden = !types.length;
  showBesideText();
}

async function showControl() {
  const canvas = $("control-canvas");
  const bitmap = control && await createImageBitmap(control);
  [canvas.width, canvas.height] = bitmap ? [bitmap.width, bitmap.height] : [64, 64];
  if (bitmap) canvas.getContext("2d").drawImage(bitmap, 0, 0);
  $("control-remove").hidden = !control;
  $("control-title").textContent = control ? "Control image" : "Choose an image, or drop it here";
  if (control) $("control").open = true;
  showBesideText();
}

/** What stands in the folded parts, in a line each. */
export function showBesideText() {
  $("adapters-text").textContent = rows().map((row) => `${row.dataset.name} ${row.querySelector("input").value}`).join(", ");
  $("control-scale-out").textContent = Number.parseFloat($("control-scale").value).toFixed(2);
  paintRange($("control-scale"));
  $("control-text").textContent = control ? `${besideSettings().steered.type ?? network().name} ${$("control-scale").value}` : "";
}

export async function takeControl(file) {
  if (!file?.type.startsWith("image/")) return toast("That is no image.");
  await setControl(file).then(changed, () => { control = null; toast("This browser cannot read that image."); });
}

export function prepareBeside() {
  $("adapter-add").addEventListener("change", () => {
    const name = $("adapter-add").value;
    $("adapter-add").value = "";
    if (name) ($(`adapter-${name}`) ?? addAdapter(name)).focus();
    changed();
  });
  for (const id of ["control-open", "control-choose"]) $(id).addEventListener("click", () => $("control-file").click());
  $("control-file").addEventListener("change", () => {
    if ($("control-file").files[0]) takeControl($("control-file").files[0]);
    $("control-file").value = "";
  });
  $("control-network").addEventListener("change", showNetwork);
  $("control-remove").addEventListener("click", () => { setControl(null).then(changed); $("control-open").focus(); });
}
