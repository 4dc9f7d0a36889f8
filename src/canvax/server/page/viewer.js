// One image, large: its settings and what can be done with it.
import { editing, samplerLabel, upscaling } from "./composer.js";
import { byId, listed, removeRecords, toggleFavourite } from "./gallery.js";
import { blobOf, crisp, fileName, show as showImage } from "./pictures.js";
import { labelOf } from "./sheet.js";
import { $, announce, button, copy, el, on, openDialog, save } from "./ui.js";

/** How many times the viewer enlarges an image; more shows only blur. */
const LARGEST = 3;
let current = null;
/** Set by main.js: vary, varyLittle, upscale, use, mask, compare, restore; each is given the record. */
export const viewerActions = {};
export const viewed = () => ($("viewer").open ? current : null);

export function view(id) {
  current = byId(id);
  if (!current) return $("viewer").close();
  show();
  openDialog($("viewer"));
  fit();
}

/** Of an image beside the prompt: what read it, and how strongly. */
const read = ({ network, type = network, scale }) => `${type} ${scale}`;

function show() {
  const { settings, width, height, created, kind, missing = [] } = current;
  showImage($("viewer-image"), current);
  $("viewer-image").alt = settings.prompt;
  crisp($("viewer-image"), kind === "sheet" ? 999 : width);
  $("viewer-title").textContent = kind === "sheet" ? "Sheet" : "Image";
  $("viewer-prompt").textContent = settings.prompt;
  $("viewer-negative").textContent = settings.negative_prompt ? `Without: ${settings.negative_prompt}` : "";
  const rows = [["Seed", settings.seed], [kind === "sheet" ? "Pixels" : "Size", `${width} × ${height}`], ["Steps", settings.steps], ["Guidance", settings.upscale ? null : settings.guidance_scale],
    ["Sampler", samplerLabel(settings.sampler)], ["Strength", current.inputs?.image || missing.includes("image") ? settings.strength : null],
    ["Reference images", current.inputs?.references && 1 + current.inputs.references.length],
    ["VAE", settings.vae], ["Adapters", Object.entries(settings.adapters ?? {}).map(([name, weight]) => `${name} ${weight?.unet ?? weight}`).join(", ")],
    ["Control", current.inputs?.control ? read(settings.steered) : null], ["Image prompt", current.inputs?.image_prompt ? read(settings.prompted) : null],
    ["Upscaled", settings.upscale ? `${settings.upscale} ×` : null], ["Model", settings.model], ...(settings.varied ?? []).map(([name, text]) => [labelOf(name), text]),
    ...Object.entries(settings.options ?? {}).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "string" ? value : JSON.stringify(value)]), ["Not in the file", missing.join(", ")],
    ["Made", new Date(created).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })]];
  $("viewer-settings").replaceChildren(...rows.filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
  showActions();
  const all = listed();
  const place = all.findIndex(({ id }) => id === current.id);
  $("viewer-previous").disabled = place <= 0;
  $("viewer-next").disabled = place < 0 || place >= all.length - 1;
}

function showActions() {
  const act = (name) => () => viewerActions[name](current);
  const one = (icon, label, action, key, className = "quiet") => {
    const node = button(icon, label, action, { text: true, className });
    if (key) node.setAttribute("aria-keyshortcuts", key);
    return node;
  };
  const picture = [
    one("vary", "New seed", act("vary"), "v"), one("dice", "Variation", act("varyLittle"), "Shift+V"),
    one("input", editing() ? "Add as reference" : "Add as input", act("use"), "u"), one("brush", "Paint a mask", act("mask"), "p"),
    one("compare", "Compare", act("compare"), "c"), one("undo", "Restore settings", act("restore"), "r"),
    one("copy", "Copy the prompt", () => copy(current.settings.prompt)),
  ];
  if (viewerActions.canUpscale()) picture.splice(2, 0, one("larger", `Upscale ${upscaling().upscale} ×`, act("upscale"), "e"));
  const favourite = one("heart", "Favourite", async () => {
    await toggleFavourite(current.id);
    favourite.ariaPressed = String(current.favourite);
  }, "f", "quiet favourite");
  favourite.ariaPressed = String(current.favourite);
  $("viewer-actions").replaceChildren(
    ...(current.kind === "sheet" ? [] : picture), el("div", { className: "keeping" }, favourite,
    one("download", "Save", async () => save(await blobOf(current), fileName(current)), "d"), one("trash", "Delete", remove, "Delete")));
}

/** The image fills the stage, up to LARGEST times; icons in whole multiples. */
function fit() {
  if (!current || !$("viewer").open) return;
  const stage = $("viewer-image").parentElement;
  const style = getComputedStyle(stage);
  const room = [stage.clientWidth - Number.parseFloat(style.paddingLeft) * 2, stage.clientHeight - Number.parseFloat(style.paddingTop) * 2];
  let scale = Math.min(room[0] / current.width, room[1] / current.height);
  if (current.width <= 160 && current.kind !== "sheet") scale = Math.max(1, Math.floor(scale));
  else scale = Math.min(scale, LARGEST);
  $("viewer-image").style.width = `${current.width * scale}px`;
  $("viewer-image").style.height = `${current.height * scale}px`;
}

export function step(by) {
  const all = listed();
  const next = all[all.findIndex(({ id }) => id === current?.id) + by];
  if (!next) return;
  view(next.id);
  announce(`${next.settings.prompt}, seed ${next.settings.seed}`);
}

export async function remove() {
  const all = listed();
  const place = all.findIndex(({ id }) => id === current.id);
  const next = all[place + 1] ?? all[place - 1];
  const id = current.id;
  $("viewer").close();
  await removeRecords([id]);
  if (next && !document.activeElement?.closest(".tile")) $("tiles").querySelector(`[data-id="${next.id}"] .target`)?.focus();
}

export function prepareViewer() {
  on("viewer-previous", "click", () => step(-1));
  on("viewer-next", "click", () => step(1));
  new ResizeObserver(fit).observe($("viewer-image").parentElement);
  on("viewer", "keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  on("viewer", "close", () => {  // some time after an action has closed it and perhaps moved the focus
    if (document.activeElement.matches("body, .tile *")) $("tiles").querySelector(`[data-id="${current?.id}"] .target`)?.focus();
  });
}
