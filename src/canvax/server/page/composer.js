// The form: what to draw and how; the input image and its mask.
import { getJson } from "./api.js";
import { besideBody, besideFiles, besideImages, besideSettings, optionsOf, prepareBeside, restoreBeside, setAdapters, showBeside, showBesideText, showPrepared } from "./beside.js";
import { canvasOf, centred, crisp, fitted, paint, paintedFrom, scaleTo, tinted, toBlob, toDataUrl } from "./pictures.js";
import { preparePrompt, showSyntax } from "./prompt.js";
import { inputs } from "./store.js";
import { $, announce, button, choice, el, link, on, openDialog, plural, remember, remembered, setIcon, toast } from "./ui.js";
import { prepareWords, saidOfWord, showWords } from "./words.js";

let catalogue = { models: [], samplers: [], curves: [] };
/** {original, bitmap of it, mask: canvas or null, whole: what was extended} or null. The mask lies over the image as it fills the mask's size. */
let input = null;
/** Reference images after the input image, of a model that edits. */
let references = [];
/** Resolved once the last chosen input image is read. */
let inputRead = Promise.resolve();
let lastSeed = null;
/** Options of a restored image that have no field: sent as they are. */
let others = {};
/** Settings that were chosen or restored, and stay with another model. */
let chosen = new Set();
/** The card that the form shows. */
let shown = null;
/** The prompt that the page wrote last. */
let written = "";

/** The card of a model; without a model, that of the first, which is the default. */
export const cardOf = (id) => catalogue.models.find((one) => one.id === id) ?? catalogue.models[0];
export const model = () => cardOf($("model").value);
/** The ControlNets of the start that a model cannot use. */
const unfit = ({ controls }) => controls.filter(({ fault }) => fault);
export const models = () => catalogue.models.map(({ id }) => id);
export const samplers = () => catalogue.samplers.filter(({ name }) => model()?.samplers?.includes(name) ?? true);
export const curves = () => catalogue.curves;
export const samplerLabel = (name) => catalogue.samplers.find((one) => one.name === name)?.label ?? name;
export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
export const currentInput = () => input;
export const sizeNow = () => ["width", "height"].map((id) => Number($(id).value));
/** The input image, and its mask or null, at the form's size. */
export const fittedInput = async () => [await fitted(input.original, ...sizeNow()), input.mask && maskAt(input, ...sizeNow())];
/** Whether the model reads the input image, and others, and begins from noise. */
export const editing = () => Boolean(model()?.references && !input?.mask);
export const knows = (id) => models().includes(id);
/** What a file is called, without folders and ending. */
const stem = (text) => text.split("/").at(-1).replace(/\.(safetensors|gguf|ckpt|pt)$/i, "").toLowerCase();
/** What a recorded name may mean: the model of this id, else those whose file or folder has the name. */
export const meant = (name, names = models()) => (names.includes(name) ? [name] : names.filter((one) => stem(one) === stem(name)));
/** Whether the prompt was typed, and not written by the page. */
export const isTyped = () => $("prompt").value.trim() && $("prompt").value !== written;
export const hasModels = () => catalogue.models.length > 0;

const LINKED = [["steps", "steps-number"], ["guidance", "guidance-number"]];

const option = ({ name, label }) => choice(name, label);

export async function setCatalogue(models) {
  catalogue = models;
  $("model").replaceChildren(...models.models.map((card) => choice(card.id, card.name + unfit(card).map(({ name }) => ` (without ControlNet ${name})`).join(""))));
  $("model").value = cardOf()?.id;
  $("of-model").disabled = !hasModels();
  $("model-field").hidden = models.models.length < 2;
  $("sigmas").replaceChildren(choice("", "The model's"), ...models.curves.map(option));
  const draft = remembered("draft", {});
  showModel();
  const applied = apply({ options: usualOptions(), adapters: {}, ...draft });
  written = "";  // the draft may have been typed
  if (draft.style) $("style").value = draft.style;
  for (const [id, value] of Object.entries(remembered("upscaling", {}))) $(id).value = value;
  showUpscaling();
  showLock(remembered("lock", false));
  await applied;
  await restoreInputs(draft);
}

/** The images of the form, as they are kept, and a promise of having kept them. */
let keptInputs = [null, null, null, null];
let keeping = Promise.resolve();

function keepInputs() {
  const { control, image_prompt } = besideImages();
  const now = [input?.original ?? null, input?.mask ?? null, control, image_prompt, ...references];
  if (now.length === keptInputs.length && now.every((one, i) => one === keptInputs[i])) return;
  keptInputs = now;
  const [kept, more, soft, only] = [input, references, $("mask-soft").checked, $("mask-only").checked];
  keeping = keeping.then(async () => {
    const mask = kept?.mask && await maskBlob(kept, kept.mask.width, kept.mask.height);
    await inputs.put({ id: "form", image: kept?.original, mask, whole: kept?.whole, soft, only, references: more, control, image_prompt });
  }).catch(() => toast("This browser cannot keep the input image: it is gone after a reload."));
}

/** The images of the form when the page was closed. */
async function restoreInputs({ width, height, strength, ...draft }) {
  const { image, mask, whole, soft, only, references: more, ...beside } = (await inputs.all().catch(() => []))[0] ?? {};
  if (input || !(image || beside.control || beside.image_prompt)) return;
  try {
    if (image && (model()?.references || model()?.tasks.includes("image-to-image"))) {
      await replaceInput(image, mask ? await paintedFrom(mask) : null, more);
      [$("mask-soft").checked, $("mask-only").checked] = [soft, only];
      await apply({ width, height, strength });
      input.whole = whole;
    } else if (image) toast("The input image of your last visit is left out: this model cannot start from images.");
    await restoreBeside(beside, draft);
  } catch {
    toast("The images of your last visit cannot be read.");
  }
  keepDraft();
}

/** A sentence on what had to change for another model; "" if nothing did. */
function chooseModel(id) {
  if (id === $("model").value) return "";
  $("model").value = id;
  return showModel();
}

/**
 * Return what of restored settings the form could not take: `setting`, `text`, and the nearest choices, {label: action},
 * where there are any. An action returns what else it had to change.
 */
export function notTaken({ model: name, width, height, options = {}, vae }) {
  const left = [];
  const [w, h, other, times] = [...sizeNow(), $("vae").value, Number($("hires").value)];
  const pass = Object.fromEntries(Object.entries(options).filter(([option]) => option.startsWith("hires")));
  // What did not fit the model before is tried once more, unless it was changed since.
  const use = (id) => () => {
    const again = { ...(sizeNow().join() === [w, h].join() && { width, height }), ...($("vae").value === other && { vae }) };
    const second = pass.hires > 1 && times !== pass.hires && Number($("hires").value) === times;
    const changed = chooseModel(id);
    apply({ ...again, ...(second && { options: { ...optionsNow(), ...pass } }) });
    keepDraft();
    return changed;
  };
  if (name && !meant(name).includes(model()?.id)) {
    const choices = Object.fromEntries(meant(name).slice(0, 3).map((id) => [`Use ${id}`, use(id)]));
    left.push({ setting: "model", text: `the model ${name} (${model()?.name} is selected)`, choices });
  }
  if (width && height && (w !== width || h !== height)) left.push({ setting: "size", text: `the size ${width} × ${height} (now ${w} × ${h})` });
  const used = other || model()?.vae || "the model's";
  if (options.outpaint) left.push({ setting: "outpaint", text: "outpaint" });
  if (vae && stem(vae) !== stem(used)) left.push({ setting: "vae", text: `the VAE ${vae} (${used} is used)` });
  if (options.hires > 1 && times !== options.hires) {
    const nearest = [...$("hires").options].map(({ value }) => Number(value)).filter((value) => value > 1).at(-1);
    const set = () => { setOptions({ ...optionsNow(), ...pass, hires: nearest }); keepDraft(); };
    left.push({ setting: "hires", text: `the second pass of ${options.hires} ×`, choices: nearest ? { [`Use ${nearest} ×`]: set } : {} });
  }
  return left;
}

/** The fields for the chosen model. Return what had to change of what was chosen. */
function showModel() {
  const card = model();
  if (!card) return "";
  const kept = {
    size: sizeNow(), sampler: $("sampler").value || shown?.sampler || "",
    style: $("style").value, vae: $("vae").value,
  };
  shown = card;
  $("about-model").textContent = `${card.name} · ${card.family}`;
  const sizes = sizesOf(card).map(([w, h]) => choice(`${w}x${h}`, `${w}×${h}${shapeOf(w, h)}`));
  if (card.any_size) sizes.push(choice("other", "Another…"));
  $("style").replaceChildren(choice("", "Any"), ...card.styles.map((name) => choice(name)));
  if (card.styles.includes(kept.style)) $("style").value = kept.style;
  $("style-field").hidden = !card.styles.length;
  const usable = { negative: card.negative_prompt, guidance: card.guided, syntax: card.prompt_weights, "clip-skip": card.clip_skip, upscale: card.tasks.includes("upscaling") };
  for (const [id, is] of Object.entries(usable)) $(`${id}-field`).hidden = !is;
  $("clip-skip").max = card.clip_skip;
  for (const id of ["guidance", "guidance-number"]) $(id).min = card.no_guidance;
  $("size").replaceChildren(...sizes);
  for (const id of ["width", "height"]) $(id).step = $(id).min = card.size_step;
  $("count").max = card.max_images;
  for (const id of ["steps", "steps-number"]) $(id).max = card.max_steps;
  $("steps").max = Math.min(card.max_steps, Math.max(20, 2 * card.steps));
  const first = choice("", card.sampler ? `Default: ${samplerLabel(card.sampler)}` : "Default");
  $("sampler").replaceChildren(first, ...samplers().map(option));
  ownSettings();
  showVaes(card);
  const changed = [...keepChosen(card, kept), ...unfit(card).map(({ fault }) => fault.replace(/\.$/, ""))];
  showInput();
  showSyntax();
  showBeside(card);
  return changed.length ? `Not for ${card.name}: ${changed.join(", ")}.` : "";
}

/** Put chosen values back where the model can do them; returns what had to change. */
function keepChosen(card, { size, sampler, style, vae }) {
  const changed = [];
  if (chosen.has("size")) {
    const possible = [size, size.map((side) => toStep(side, card.size_step))].find((one) => canMake(...one)) ?? nearest(...size);
    setSize(...possible);
    if (possible.join() !== size.join()) changed.push(`the size ${size.join(" × ")} (now ${possible.join(" × ")})`);
  }
  const found = samplerOf(sampler);
  if (chosen.has("sampler")) {
    if (!found || samplers().includes(found)) setSampler(sampler);
    else {
      chosen.delete("sampler");
      changed.push(`the sampler ${found.label} (now ${samplerLabel(card.sampler) || "the model's"})`);
    }
  }
  const labels = { count: "images", "steps-number": "steps", "guidance-number": "guidance", "clip-skip": "CLIP skip" };
  for (const [id, label] of Object.entries(labels)) {
    const [field, value] = [$(id), Number($(id).value)];
    if (field.closest(".field").hidden || !field.value) continue;
    const possible = Math.max(field.min, Math.min(field.max || Infinity, value));
    if (possible === value) continue;
    if (id.endsWith("-number")) setNumber(id.replace("-number", ""), possible);
    else field.value = possible;
    changed.push(`${label} ${value} (now ${possible})`);
  }
  if (style !== $("style").value) changed.push(`the style ${style}`);
  if (vae !== $("vae").value) changed.push(`the VAE ${vae} (now ${card.vae || "the model's"})`);
  return changed;
}

/** The VAEs for a model; the chosen one stays, if it is among them. */
function showVaes({ vae, vaes = {} }) {
  const before = $("vae").value;
  const options = optionsOf(Object.entries(vaes).map(([name, fault]) => ({ name, fault })));
  $("vae").replaceChildren(choice("", vae || "The model's"), ...options);
  $("vae-field").hidden = !options.length;
  setVae(before);
}

/** The VAE of this name, in other cases and with an ending too; without one here, the model's. */
function setVae(name) {
  $("vae").value = [...$("vae").options].find(({ value, disabled }) => value && !disabled && stem(value) === stem(name))?.value ?? "";
}

const SHAPES = [[1, 1], [4, 3], [3, 2], [16, 9], [3, 4], [2, 3], [9, 16]];

const toStep = (value, step) => Math.max(step, Math.round(value / step) * step);

/** The sizes that are ready, and the usual shapes that a server compiles. */
function sizesOf(card) {
  const [area, step] = [card.size[0] * card.size[1], card.size_step];
  const round = (value) => toStep(value, step);
  const usual = SHAPES.map(([w, h]) => [round(Math.sqrt((area * w) / h)), round(Math.sqrt((area * h) / w))]).filter((size) => canMake(...size, card));
  return [...new Map([...card.sizes, ...usual].map((size) => [size.join(), size])).values()];
}

export const sizes = () => sizesOf(model());
/** Times the pixels of the largest ready size, for which a server compiles. */
const LARGEST = 4;
/** Whether the model makes images of this size. */
export const canMake = (width, height, { any_size: any, size_step: step, sizes: ready } = model()) => ready.some(([w, h]) => w === width && h === height)
  || (any && [width, height].every((side) => side > 0 && side % step === 0) && width * height <= LARGEST * Math.max(...ready.map(([w, h]) => w * h)));

/** The usual name of a shape, where it has one. */
function shapeOf(width, height) {
  const shape = SHAPES.find(([w, h]) => Math.abs(Math.log((width / height) / (w / h))) < 0.05);
  return shape ? ` (${shape.join(":")})` : "";
}

/** Size, steps, guidance and sampler as the model's card has them, unless they were chosen. */
function ownSettings() {
  const card = model();
  if (!chosen.has("size")) setSize(...card.size);
  setNumber("steps", chosen.has("steps") ? $("steps-number").value : card.steps);
  setNumber("guidance", chosen.has("guidance") ? $("guidance-number").value : card.guidance_scale);
  setSampler("");
  if (!chosen.has("hires-strength")) $("hires-strength").value = hiresStrength();
  if (!remembered("upscaling", {})["upscale-strength"]) $("upscale-strength").value = Math.min(0.3, card.hires_strength);
}

function setNumber(id, value) {
  $(`${id}-number`).value = value;
  $(id).value = value;
  paintRange($(id));
  showGuidance();
}

/** Without guidance no negative prompt is read. */
function showGuidance() {
  const least = model()?.no_guidance;
  const off = Number($("guidance-number").value) <= least;
  $("negative").disabled = off;
  $("negative").placeholder = off ? `Needs guidance above ${least}` : "";
}

export function paintRange(range) {
  range.style.setProperty("--part", `${((range.value - range.min) / (range.max - range.min)) * 100}%`);
}

function setSize(width, height) {
  if (!canMake(width, height)) [width, height] = nearest(width, height);
  const size = `${width}x${height}`;
  $("size").value = [...$("size").options].some(({ value }) => value === size) ? size : "other";
  $("width").value = width;
  $("height").value = height;
  showSize();
}

function showSize() {
  const other = $("size").value === "other";
  $("width-field").hidden = $("height-field").hidden = !other;
  if (!other) [$("width").value, $("height").value] = $("size").value.split("x");
  showInput();
  if (input?.whole) extend(input.whole);
  showPrepared();
}

/** The shorter side of an image is so many standard deviations of a soft mask edge. */
const SOFT = 40;
/** And so many times what is seen around the masked part, if only that is drawn. */
const AROUND = 16;

const HIRES = [1.5, 2, 3, 4];
/** Of a second pass, by default: latents that are made larger stay blurred below 0.55 or so. */
const hiresStrength = (method = $("hires-method").value) => (method === "latent" ? 0.7 : model()?.hires_strength);

/** The size of a second pass, as the server rounds it; null if it cannot be made. */
function larger(times) {
  const step = Math.max(8, model().size_step);
  const size = sizeNow().map((side) => {
    const parts = (side * times) / step;
    return step * (parts % 1 === 0.5 ? 2 * Math.round(parts / 2) : Math.round(parts));
  });
  return canMake(...size) ? size : null;
}

/** Which second passes there are; `times`: the one to choose. */
function showHires(times = Number($("hires").value)) {
  if (!model()) return;
  const offered = [...new Set([...HIRES, times])].sort((a, b) => a - b).filter((one) => one > 1 && larger(one));
  $("hires").replaceChildren(choice(1, "None"), ...offered.map((one) => choice(one, `${one} ×, ${larger(one).join(" × ")}`)));
  $("hires").value = offered.includes(times) ? times : 1;
  const why = input ? "A second pass needs a prompt alone, without an input image." : offered.length ? "" : "No larger size is ready. Start the server with --compile-on-demand, or with --warm and a larger size.";
  $("hires-why").textContent = why;
  $("hires-fields").hidden = Boolean(why);
  $("hires-text").textContent = $("hires").value > 1 && !why ? `${$("hires").value} ×` : "";
  $("hires-strength-out").textContent = Number($("hires-strength").value).toFixed(2);
  paintRange($("hires-strength"));
}

/** The listed size that is most like these. */
function nearest(width, height) {
  const distance = ([w, h]) => Math.abs(Math.log((w / h) / (width / height))) * 4 + Math.abs(Math.log((w * h) / (width * height)));
  const listed = [...$("size").options].map(({ value }) => value.split("x").map(Number)).filter(([w]) => w);
  return (model().any_size ? listed : [...model().sizes]).sort((a, b) => distance(a) - distance(b))[0] ?? model().native;
}

function setSampler(name) {
  const select = $("sampler");
  const byLabel = catalogue.samplers.find(({ label }) => label === name)?.name;
  const value = byLabel ?? name ?? "";
  if ([name, value].includes(model()?.sampler)) select.value = "";
  else {
    if (![...select.options].some((option) => option.value === value)) select.append(choice(value));
    select.value = value;
  }
  showSampler();
}

/** The sampler of a name or a label, which may end with a schedule type. */
const samplerOf = (name) => catalogue.samplers.find((one) => one.name === name || name === one.label)
  ?? catalogue.samplers.filter((one) => name.startsWith(one.label)).sort((a, b) => b.label.length - a.label.length)[0];

function showSampler() {
  const found = samplerOf($("sampler").value || model()?.sampler || "");
  const curve = catalogue.curves.find((one) => one.name === $("sigmas").value);
  // The card has the steps of the model's own sampler.
  const when = (found?.when ?? "").replace($("sampler").value ? "" : /[,;] \d+ to \d+ steps(?=[.,;])/, "").replace(/ [^.]*`[^.]*\./, "");
  $("sampler-when").textContent = $("sampler").title = [when, curve && `${curve.label}: ${curve.when}.`].filter(Boolean).join(" ").replaceAll("`", "");
}

function showLock(locked) {
  $("seed-lock").ariaPressed = String(locked);
  setIcon($("seed-lock"), locked ? "lock" : "unlock");
  remember("lock", locked);
}

export const seedIsNumber = () => !locked() || /^\d*$/.test($("seed").value.trim());
const locked = () => $("seed-lock").ariaPressed === "true";
export const toggleLock = () => {
  if (!locked() && !$("seed").value) $("seed").value = lastSeed ?? randomSeed();
  showLock(!locked());
};

/** The form as settings of a job. Without input images. */
export function settings() {
  const number = (id, otherwise) => (Number.isFinite(Number.parseFloat($(id).value)) ? Number.parseFloat($(id).value) : otherwise);
  const card = model();
  const style = $("style").value && !/\bstyle\b/i.test($("prompt").value) ? `, ${$("style").value} style` : "";
  const prompt = $("prompt").value.trim();
  const result = {
    prompt: prompt && prompt + style,
    n: number("count", 1),
    width: number("width", card?.size[0]),
    height: number("height", card?.size[1]),
    steps: number("steps-number", card?.steps),
    guidance_scale: card?.guided ? number("guidance-number", card.guidance_scale) : undefined,
    format: $("format").value,
    previews: $("previews").checked,
  };
  if ($("negative").value.trim() && card?.negative_prompt && !$("negative").disabled) result.negative_prompt = $("negative").value.trim();
  if (catalogue.models.length > 1) result.model = card.id;
  if ($("vae").value) result.vae = $("vae").value;
  if ($("sampler").value) result.sampler = $("sampler").value;
  if (locked() && $("seed").value) result.seed = Number.parseInt($("seed").value, 10);
  const options = { ...ofMask(), ...optionsNow() };
  if (Object.keys(options).length) result.options = options;
  if (input && !editing()) result.strength = Number.parseFloat($("strength").value);
  return Object.assign(result, besideSettings());
}

/** Without those of a mask. */
export const maskless = (options) => Object.fromEntries(Object.entries(options).filter(([name]) => !name.includes("mask")));

const usable = () => (input?.mask ? { ...others } : maskless(others));

/** Of the editor of masks. */
function ofMask() {
  const pixels = (part) => Math.max(1, Math.round(Math.min(...sizeNow()) / part));
  return input?.mask ? { ...($("mask-soft").checked && { mask_blur: pixels(SOFT) }), ...($("mask-only").checked && { padding_mask_crop: pixels(AROUND) }) } : {};
}

function optionsNow() {
  const options = usable();
  const card = model();
  if ($("syntax").value !== "plain" && card?.prompt_weights) options.prompt_syntax = $("syntax").value;
  if (Number($("clip-skip").value) && card?.clip_skip) options.clip_skip = Number($("clip-skip").value);
  if ($("sigmas").value) options.sigmas = $("sigmas").value;
  if ($("quality").checked) options.quality = "fast";
  if ($("hires").value > 1 && !input) {
    Object.assign(options, { hires: Number($("hires").value), hires_strength: Number($("hires-strength").value) });
    if ($("hires-method").value !== "pixel") options.hires_method = $("hires-method").value;
    if (Number($("hires-steps").value)) options.hires_steps = Number($("hires-steps").value);
  }
  return options;
}

function setOptions({ prompt_syntax: syntax = "plain", clip_skip: skip = 0, quality, hires = 1, hires_method: method = "pixel", hires_strength: strength, hires_steps: steps = "", ...rest }) {
  for (const [id, value] of Object.entries({ syntax, "clip-skip": skip, "hires-method": method, "hires-strength": strength ?? hiresStrength(method), "hires-steps": steps })) $(id).value = value;
  $("quality").checked = quality === "fast";
  choose("hires-strength", undefined, strength);
  showHires(hires);
  $("sigmas").value = rest.sigmas ?? "";
  showSampler();
  // Those of a control image have fields, a list of sigmas none; outpaint is left out.
  others = Object.fromEntries(Object.entries(rest).filter(([name]) => !/^control_|outpaint/.test(name) && (name !== "sigmas" || !$("sigmas").value)));
  showOthers();
}

function showOthers() {
  const shown = Object.entries(usable());
  $("other-options").replaceChildren(...shown.map(([name, value]) => el("li", { className: "chip" },
    el("span", { textContent: `${name.replaceAll("_", " ")} ${JSON.stringify(value)}` }), button("close", `Leave out ${name}`, () => {
      const { [name]: _, ...left } = optionsNow();
      setOptions(left);
      keepDraft();
    }))));
  $("other-field").hidden = !shown.length;
}

/** Options of a new form: the prompt syntax of the server's folder of models. */
const usualOptions = () => ({ prompt_syntax: document.body.dataset.syntax ?? "plain" });

/** How images are upscaled. */
export const upscaling = () => ({ upscale: Number($("upscale-by").value), strength: Number($("upscale-strength").value) });

/** A field that stays with another model, unless `value` says that it is the model's. */
function choose(name, set = () => {}, value = true) {
  set();
  chosen[value ? "add" : "delete"](name);
}

/** Put settings into the form; the rest stays. Adapters come last, once they are listed. */
export async function apply(given) {
  const [id, ...twins] = given.model ? meant(given.model) : [];
  if (id && !twins.length) chooseModel(id);
  if (given.prompt !== undefined) $("prompt").value = written = given.prompt;
  if (given.prompt !== undefined || given.negative_prompt !== undefined) $("negative").value = given.negative_prompt ?? "";
  if (given.width && given.height && model()) choose("size", () => setSize(given.width, given.height));
  if (given.steps) choose("steps", () => setNumber("steps", given.steps));
  if (given.guidance_scale !== undefined && given.guidance_scale !== null) choose("guidance", () => setNumber("guidance", given.guidance_scale));
  if (given.sampler !== undefined && given.sampler !== null) choose("sampler", () => setSampler(given.sampler), given.sampler);
  if (given.vae !== undefined) setVae(given.vae);
  if (given.n) $("count").value = given.n;
  if (given.format) $("format").value = given.format;
  if (given.upscale) {
    if ([...$("upscale-by").options].some(({ value }) => Number(value) === given.upscale)) $("upscale-by").value = given.upscale;
    if (given.strength) $("upscale-strength").value = given.strength;
    showUpscaling();
  } else if (given.strength !== undefined && given.strength !== null) $("strength").value = given.strength;
  if (given.options) setOptions(given.options);
  if (given.seed !== undefined && given.seed !== null) $("seed").value = given.seed;
  if (given.lock !== undefined) showLock(given.lock);
  showStrength();
  showFold();
  showSyntax();
  showWords();
  growAll();
  if (given.adapters) await setAdapters(given.adapters);
}

function showStrength() {
  $("strength-field").hidden = !input || editing();
  $("strength-out").textContent = Number.parseFloat($("strength").value).toFixed(2);
  paintRange($("strength"));
}

function showUpscaling() {
  $("upscale-strength-out").textContent = Number($("upscale-strength").value).toFixed(2);
  paintRange($("upscale-strength"));
}

/** The text areas are as high as their text. */
function growAll() {
  for (const id of ["prompt", "negative"]) {
    const area = $(id);
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
  }
}

export function usedSeed(seed) {
  if (locked()) return;
  lastSeed = seed;
  $("seed").value = "";
  $("seed").placeholder = `Random, last ${seed}`;
}

/** What stands in the folded part, in a line. */
function showFold() {
  const { width, height, n, steps, guidance_scale: guidance } = settings();
  const { prompt_syntax: syntax, ...options } = optionsNow();
  const named = Object.keys(options).filter((name) => !/^(hires|sigmas|quality)/.test(name)).map((name) => name.replaceAll("_", " "));
  $("more-text").textContent = [syntax, ...named].filter(Boolean).join(", ");
  $("fold-text").textContent = [plural(n, "image"), `${width} × ${height}`, `${steps} steps${options.quality ? ", fast" : ""}`, ...(guidance === undefined ? [] : [`guidance ${guidance}`])].join(" · ");
}

/** What is not kept unless it was chosen: the model's card has it. */
const DRAFTED = { size: ["width", "height"], steps: ["steps"], guidance: ["guidance_scale"] };

export const keepDraft = () => {
  if (!hasModels()) {  // the rest stays as the last visit left it
    const draft = remembered("draft", {});
    for (const [name, id] of [["prompt", "prompt"], ["negative_prompt", "negative"], ["seed", "seed"]]) draft[name] = $(id).value.trim() || draft[name];
    return remember("draft", draft);
  }
  showFold();
  showBesideText();
  keepInputs();
  const { seed, previews, ...draft } = settings();
  draft.prompt = $("prompt").value.trim();  // without the style, which has its field
  draft.options = optionsNow();
  draft.sampler = chosen.has("sampler") ? $("sampler").value || model()?.sampler : "";
  for (const [name, fields] of Object.entries(DRAFTED)) if (!chosen.has(name)) for (const field of fields) delete draft[field];
  if (!chosen.has("hires-strength")) delete draft.options.hires_strength;
  remember("draft", { ...draft, style: $("style").value, negative_prompt: draft.negative_prompt ?? "", ...(locked() ? { seed } : {}) });
};

/** A function that puts back what using an image as input changes. */
export function snapshot() {
  const [before, more, options, size, sized] = [input, references, others, sizeNow(), chosen.has("size")];
  const fields = Object.fromEntries(["prompt", "negative", "strength"].map((id) => [id, $(id).value]));
  return async () => {
    [input, references, others] = [before, more, options];
    choose("size", () => setSize(...size), sized);
    for (const [id, value] of Object.entries(fields)) $(id).value = value;
    showInput();
    growAll();
    keepDraft();
  };
}

/**
 * Use an image as input, with a mask or without. The size becomes one that is ready. Under a mask all is generated anew
 * at first; without one strength 1 would keep nothing of the image. `more`: the reference images after it.
 */
export const setInput = (blob, mask = null, more = references) => inTurn(() => replaceInput(blob, mask, more).then(keepDraft));

/** Add images to those that the model edits, as there is room: whether that was all. In order: the first is the input image. */
export const takeReferences = (blobs) => inTurn(() => addReferences(blobs));

const inTurn = (change) => (inputRead = whenInputRead().then(change));

async function addReferences(blobs) {
  let all = true;
  for (const blob of blobs) {
    if (input && references.length + 1 >= model().references) {
      toast(`At most ${plural(model().references, "reference image")}: remove one first${model().any_size ? "" : ", or start the server with --references or --compile-on-demand"}.`);
      all = false;
      break;
    }
    try {
      if (!input) await replaceInput(blob, null, []);
      else if (await createImageBitmap(blob)) references = [...references, blob];
    } catch {
      toast("This browser cannot read that image.");
      all = false;
    }
  }
  showInput();
  keepDraft();
  if (all) announce(editing() ? plural(1 + references.length, "reference image") : "Added as input image");
  return all;
}

/** Put the whole input image, or `whole` for another size, smaller where it would fill the size, into a mask. */
const extend = (whole) => inTurn(async () => {
  const [width, height] = sizeNow();
  if (!input || input.whole !== whole || !canMake(width, height)) return;
  if (input.mask?.width === width && input.mask.height === height) return;
  const from = whole ?? input.original;
  const bitmap = await createImageBitmap(from);
  const [x, y] = [width / bitmap.width, height / bitmap.height];
  const full = Math.abs(x / y - 1) < 0.2;
  const scale = Math.min(x, y) * (full ? 0.75 : 1);
  const [w, h] = [bitmap.width, bitmap.height].map((side) => Math.round(side * scale));
  const [left, top] = [(width - w) >> 1, (height - h) >> 1];
  const [image, mask] = [0, 1].map(() => canvasOf(width, height).getContext("2d"));
  image.imageSmoothingQuality = "high";
  image.drawImage(bitmap, left, top, w, h);
  const spread = (...edge) => image.drawImage(image.canvas, ...edge);
  spread(left, top, 1, h, 0, top, left, h);
  spread(left + w - 1, top, 1, h, left + w, top, width, h);
  spread(0, top, width, 1, 0, 0, width, top);
  spread(0, top + h - 1, width, 1, 0, top + h, width, height);
  mask.fillStyle = "white";
  mask.fillRect(0, 0, width, height);
  mask.clearRect(left, top, w, h);
  if (full) toast("The image is a quarter smaller, for room around it. A wider or taller Size needs less.");
  if (!whole) $("strength").value = 1;
  input = { original: await toBlob(image.canvas), bitmap: image.canvas, mask: mask.canvas, whole: from };
  showInput();
  keepDraft();
});

/** Reference image `i`, of which 0 is the input image, is taken out. */
function removeReference(i) {
  const rest = [input.original, ...references].filter((_, at) => at !== i);
  return i ? setReferences(rest) : setInput(rest[0] ?? null, null, rest.slice(1));
}

function setReferences([, ...more]) {
  references = more;
  showInput();
  keepDraft();
}

/** Reference image `i` changes places with the one before it. */
function moveForward(i) {
  const all = [input.original, ...references];
  [all[i - 1], all[i]] = [all[i], all[i - 1]];
  return i > 1 ? setReferences(all) : setInput(all[0], null, all.slice(1));
}

/** A job that is sent at once after an image was chosen must have it. */
export const whenInputRead = () => inputRead.catch(() => {});

async function replaceInput(blob, mask, more) {
  const bitmap = blob && await createImageBitmap(blob);
  if (mask && !input?.mask) $("strength").value = 1;
  if (!mask && Number($("strength").value) === 1) $("strength").value = $("strength").defaultValue;
  [input, references] = blob ? [{ original: blob, bitmap, mask }, more] : [null, []];
  others = usable();
  if (!blob) return showInput();
  const written = $("size").value === "other" && sizeNow();
  const size = mask ? [mask.width, mask.height] : written || nearest(bitmap.width, bitmap.height);
  choose("size", () => setSize(...size));  // which shows it
}

const CUT = "cut at its edges to fit the size";
/** An image as it fills the form's size; whole while no such size can be made. */
const filling = (bitmap) => (canMake(...sizeNow()) ? centred(bitmap, ...sizeNow()) : bitmap);
const isCut = ({ width: w, height: h }, { width, height }) => Math.abs(Math.log((w * height) / (h * width))) > 0.02;

function showInput() {
  const [edits, needs] = [editing(), !model()?.tasks.includes("text-to-image")];
  const [count, picture] = [input ? 1 + references.length : 0, input && filling(input.bitmap)];
  $("input").hidden = !input && !edits && !needs;
  $("input-title").textContent = edits ? "Reference images" : input?.mask ? "Input image and mask" : "Input image";
  $("input-hint").textContent = [
    !input && needs && "this model works on an image: add one",
    input?.mask && references.length && `${plural(references.length, "more reference image")} not read: a mask goes with one image`,
    input && !input.mask && model()?.tasks[0] === "inpainting" && "this model fills masks: paint one",
    input && edits && "read together with the prompt",
    input && isCut(input.bitmap, picture) && (edits && references.length ? `number 1 is ${CUT}` : CUT),
  ].filter(Boolean).join("; ");
  $("input-number").hidden = !edits || !references.length;
  $("input-add").hidden = count >= (edits ? model().references : needs);
  $("input-file").multiple = edits;
  $("input-mask").hidden = $("input-remove").hidden = !input;
  $("input-extend").hidden = !input || input.mask;
  $("input-mask").textContent = input?.mask ? "Change the mask" : "Add mask";
  $("input-open").ariaLabel = $("input-open").title = input ? "Paint a mask on the input image" : "Add an image";
  $("references").replaceChildren(...(edits ? references.map(referenceTile) : []));
  showStrength();
  showHires();
  showOthers();
  const canvas = $("input-canvas");
  paint(canvas, picture);
  if (input?.mask) {
    const context = canvas.getContext("2d");
    context.globalAlpha = 0.6;
    context.drawImage(tinted(maskAt(input, canvas.width, canvas.height), "#e2467a"), 0, 0);
  }
  crisp(canvas, canvas.width);
}

function referenceTile(blob, at) {
  const [canvas, note, i] = [el("canvas"), el("span", { className: "hint" }), at + 1];
  createImageBitmap(blob).then((bitmap) => {
    paint(canvas, filling(bitmap));
    if (isCut(bitmap, canvas)) Object.assign(note, { textContent: "cut", title: CUT });
  });
  const act = (change) => async () => {
    await change(i);
    ($("references").children[at]?.querySelector("button") ?? $("input-add")).focus();
  };
  return el("li", {}, el("div", { className: "thumb", role: "img", ariaLabel: `Reference image ${i + 1}` }, canvas, el("span", { className: "number", textContent: i + 1, ariaHidden: "true" })),
    el("div", { className: "row tight" }, button("left", `Move reference image ${i + 1} forward`, act(moveForward)), button("close", `Remove reference image ${i + 1}`, act(removeReference))), note);
}

/** The mask of an input at a size, where it lies over the image that fills this size. */
const maskAt = ({ bitmap, mask }, width, height) => centred(mask, width, height, scaleTo(bitmap, width, height) / scaleTo(bitmap, mask.width, mask.height), false);

/** White where the mask is painted, black elsewhere. */
function maskBlob(masked, width, height) {
  const canvas = maskAt(masked, width, height);
  const context = canvas.getContext("2d");
  context.globalCompositeOperation = "destination-over";
  context.fillRect(0, 0, width, height);
  return toBlob(canvas);
}

/** The images of a job of this size. */
export async function inputFiles({ width, height }) {
  const files = await besideFiles({ width, height });
  if (!input) return files;
  files.image = await fitted(input.original, width, height);
  if (editing() && references.length) files.references = await Promise.all(references.map((blob) => fitted(blob, width, height)));
  if (input.mask) files.mask = await maskBlob(input, width, height);
  return files;
}

/** The body of the request. */
export async function bodyOf(job, files) {
  const { steered, prompted, source, ...body } = job;
  // Each tile shows a part, which the prompt would make the whole. The history keeps it.
  if (job.upscale) Object.assign(body, { prompt: "", negative_prompt: undefined, guidance_scale: cardOf(job.model)?.no_guidance ?? 1 });
  for (const [name, blob] of Object.entries(files)) body[name] = await (Array.isArray(blob) ? Promise.all(blob.map(toDataUrl)) : toDataUrl(blob));
  return Object.assign(body, besideBody(job, body));
}

/** The server's hints on a job. Syntax and embeddings have their own lines. */
export function showHints(hints) {
  const others = hints.filter((text) => !saidOfWord(text) && ($("syntax-note").hidden || !text.includes("prompt_syntax")));
  const command = /; canvax info \S+ --prompts .*/;
  $("hints").replaceChildren(...others.map((text) => el("li", { textContent: text.replace(command, ". ") },
    ...(command.test(text) ? [link("Show what it knows", showKnown), " · ", link("Other models", () => $("open-other-models").click())] : []))));
}

/** Write a prompt into the form. */
export function takePrompt(prompt) {
  apply({ prompt });
  keepDraft();
  $("prompt").focus();
}

let known = [];

async function showKnown() {
  known = (await getJson(`api/prompts?model=${encodeURIComponent(model().id)}`).catch((error) => { toast(error.message); return { prompts: [] }; })).prompts;
  if (!known.length) return;
  $("known-search").value = "";
  listKnown();
  openDialog($("known"));
}

function listKnown() {
  const words = $("known-search").value.toLowerCase().split(/\s+/);
  $("known-list").replaceChildren(...known.filter((name) => words.every((word) => name.includes(word))).map((name) => el("li", {}, link(name, () => {
    $("known").close();
    takePrompt(name);
    showHints([]);
  }, ""))));
}

/** {id, text} of a number that is missing, none or out of its range, or undefined. */
export function wrongNumber() {
  const wrong = [...$("composer").querySelectorAll("input[type=number]:not([hidden] *)")]
    .find(({ validity: { badInput, rangeUnderflow, rangeOverflow, valueMissing } }) => badInput || rangeUnderflow || rangeOverflow || valueMissing);
  if (!wrong) return undefined;
  const { id, validationMessage, validity: { badInput, valueMissing } } = wrong;
  return { id, text: valueMissing && !badInput ? `Write a ${id}.` : validationMessage };
}

/** Fields of a request that the form calls otherwise. */
const FIELDS = { image: "input-open", mask: "input-open", references: "input-add", negative_prompt: "negative", n: "count", steps: "steps-number", guidance_scale: "guidance-number", width: "size", height: "size", adapters: "adapter-add", options: "syntax", prompt_syntax: "syntax", control: "control-open", controlnet: "control-network", image_prompt: "image-prompt-open" };

/** Say what is wrong, at its field, which has an id or is of a field of the request. */
export function formError(text, param = null, id = null) {
  if (param === "options") [, param = "options"] = text.match(/^options\.(\w+)/) ?? [];
  const name = FIELDS[param] ?? param?.replaceAll("_", "-");
  const field = id ?? ($(name) ? name : null);
  for (const node of $("composer").querySelectorAll("[aria-invalid]")) {
    node.removeAttribute("aria-invalid");
    node.removeAttribute("aria-errormessage");
  }
  const at = field ? $(field).closest(".field, .more") ?? $(field).parentElement : document.querySelector(".actions");
  if ($("form-error").parentElement !== at) at[field ? "append" : "prepend"]($("form-error"));
  $("form-error").textContent = text;
  if (field) {
    for (let fold = $(field).closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    $(field).setAttribute("aria-invalid", "true");
    $(field).setAttribute("aria-errormessage", "form-error");
    $(field).focus({ preventScroll: true });
  }
  if (text) $("form-error").scrollIntoView({ block: field ? "center" : "nearest" });  // the bar with Generate hides what is below
}

export function prepareComposer() {
  on("known-search", "input", listKnown);
  prepareBeside();
  preparePrompt();
  prepareWords();
  for (const [range, number] of LINKED) {
    $(range).addEventListener("input", () => { $(number).value = $(range).value; paintRange($(range)); });
    $(number).addEventListener("input", () => { $(range).value = $(number).value; paintRange($(range)); });
    for (const id of [range, number]) on(id, "input", showGuidance);
  }
  const step = (by) => {
    const value = Math.round(Number($("count").value) + by) || 1;
    $("count").value = Math.max(1, Math.min(Number($("count").max), value));
    keepDraft();
  };
  on("count-less", "click", () => step(-1));
  on("count-more", "click", () => step(1));
  on("model", "change", () => { const changed = showModel(); keepDraft(); if (changed) toast(changed, [], 20); });
  on("size", "change", showSize);
  for (const id of ["sampler", "sigmas"]) on(id, "change", showSampler);
  on("strength", "input", showStrength);
  on("seed", "input", () => showLock($("seed").value !== ""));
  on("seed-new", "click", () => { $("seed").value = randomSeed(); showLock(true); keepDraft(); });
  on("seed-lock", "click", () => { toggleLock(); keepDraft(); });
  on("reset", "click", () => { chosen.clear(); ownSettings(); setOptions(usualOptions()); $("seed").value = ""; showLock(false); showSyntax(); keepDraft(); });
  for (const id of ["upscale-by", "upscale-strength"]) {
    on(id, "input", () => {
      showUpscaling();
      remember("upscaling", Object.fromEntries(["upscale-by", "upscale-strength"].map((name) => [name, $(name).value])));
    });
  }
  on("composer", "input", ({ target: { id, value } }) => {
    const name = id.replace("-number", "").replace(/^(width|height)$/, "size");
    if (["size", "steps", "guidance", "sampler", "hires-strength"].includes(name)) choose(name, undefined, value);
  });
  on("composer", "input", () => { formError(""); showHints([]); showSyntax(); showWords(); growAll(); keepDraft(); });
  on("input-remove", "click", () => { removeReference(0); $("prompt").focus(); });
  on("hires-method", "change", () => { $("hires-strength").value = hiresStrength(); choose("hires-strength", undefined, false); showHires(); keepDraft(); });
  for (const id of ["hires", "hires-strength"]) on(id, "input", () => showHires());
  for (const id of ["width", "height"]) on(id, "change", showSize);
  on("input-extend", "click", () => extend());
  on("input-add", "click", () => $("input-file").click());
  on("input-file", "change", () => {
    takeReferences([...$("input-file").files]);
    $("input-file").value = "";
  });
}
