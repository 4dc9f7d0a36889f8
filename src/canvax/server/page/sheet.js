// A sheet: one prompt and seed, two settings that vary, all images on one canvas with labels.
import { bodyOf, canMake, cardOf, currentInput, curves, inputFiles, model, models, randomSeed, samplers, settings, sizes } from "./composer.js";
import { canvasOf, toBlob } from "./pictures.js";
import { Task, tasks } from "./tasks.js";
import { $, choice, el, on, openDialog, plural } from "./ui.js";

const AT_ONCE = 4;
const MOST = 144;

const numbers = (test, what) => (text) => {
  const value = Number(text);
  if (text === "" || !Number.isFinite(value) || !test(value)) throw new Error(`${text || "Nothing"} is no ${what}.`);
  return value;
};

const whole = (value) => Number.isInteger(value) && value >= 0;

/** Autoencoders that the model may use in place of its VAE. */
const vaes = () => Object.entries(model()?.vaes ?? {}).filter(([, fault]) => !fault).map(([name]) => name);

const oneOf = (choices, what) => (text) => {
  const found = choices().find((names) => names.some((name) => name.toLowerCase() === text.toLowerCase()));
  if (!found) throw new Error(`There is no ${what} ${text || "without a name"}.`);
  return found[0];
};

const namesOf = ({ name, label }) => [name, label];

/** Of a text the sampler, and the schedule type where it ends with one. */
function samplerOf(text) {
  const read = oneOf(() => samplers().map(namesOf), "sampler");
  const curve = curves().find(({ label }) => text.toLowerCase().endsWith(` ${label.toLowerCase()}`));
  try {
    return { sampler: read(text) };
  } catch (error) {
    if (!curve) throw error;
    return { sampler: read(text.slice(0, -curve.label.length).trim()), sigmas: curve.name };
  }
}

const withCurve = (job, sigmas) => (sigmas ? { ...job, options: { ...job.options, sigmas } } : job);

function sizeOf(text) {
  const size = text.match(/^(\d+)\s*[x×]\s*(\d+)$/i)?.slice(1).map(Number);
  if (!size || !canMake(...size)) throw new Error(`${text || "Nothing"} is no size of this model.`);
  return size;
}

/** The settings of a job with another model, which may have no guidance. */
function ofModel(job, id) {
  const { guidance_scale, negative_prompt, ...others } = job;
  const { guided, negative_prompt: reads } = cardOf(id);
  return { ...others, model: id, ...(guided ? { guidance_scale } : {}), ...(reads && negative_prompt ? { negative_prompt } : {}) };
}

/**
 * What may vary: how a value is read, what is proposed, what it does to the settings of a job (to the one of its name, if
 * not said), and which settings these are.
 */
const AXES = {
  guidance_scale: { label: "Guidance", read: numbers((value) => value >= 0, "guidance"), propose: () => [1, 2, 4, 8] },
  steps: { label: "Steps", read: numbers((value) => value >= 1 && whole(value), "number of steps"), propose: () => [...new Set([0.5, 1, 2].map((times) => Math.ceil(model().steps * times)))].filter((n) => n <= model().max_steps) },
  seed: { label: "Seed", read: numbers(whole, "seed"), propose: () => [1, 2, 3, 4] },
  sampler: { label: "Sampler", read: samplerOf, propose: () => samplers().slice(0, 3).map(({ label }) => label), set: (job, { sampler, sigmas }) => withCurve({ ...job, sampler }, sigmas), fields: ["sampler"] },
  sigmas: { label: "Schedule type", read: oneOf(() => curves().map(namesOf), "schedule type"), propose: () => curves().slice(0, 3).map(({ label }) => label), set: withCurve, fields: [] },
  strength: { label: "Strength", read: numbers((value) => value > 0 && value <= 1, "strength from 0 to 1"), propose: () => [0.3, 0.5, 0.7, 0.9] },
  size: { label: "Size", read: sizeOf, propose: () => sizes().slice(0, 3).map((size) => size.join("x")), set: (job, [width, height]) => ({ ...job, width, height }), fields: ["width", "height"] },
  model: { label: "Model", read: oneOf(() => models().map((id) => [id]), "model"), propose: () => models().slice(0, 4), set: ofModel, fields: ["model", "guidance_scale", "negative_prompt"] },
  vae: { label: "VAE", read: oneOf(() => vaes().map((name) => [name]), "VAE"), propose: () => vaes().slice(0, 3) },
  words: { label: "Words of the prompt", read: (text) => text, propose: () => [$("prompt").value.trim().split(/\s+/).at(-1) || "apple", "pear", "lemon"], fields: [] },
  none: { label: "Nothing", read: (text) => text, propose: () => [""], set: (job) => job, fields: [] },
};

/** The axes of the form: with the weights of its adapters, without those that do not apply. */
function axes() {
  const weight = (name) => [`adapter ${name}`, {
    label: `Weight of ${name}`, read: numbers((value) => Math.abs(value) <= 10, "weight from -10 to 10"), propose: () => [0, 0.5, 1],
    set: (job, value) => ({ ...job, adapters: { ...job.adapters, [name]: value } }), fields: ["adapters"],
  }];
  const unusable = { strength: !currentInput(), guidance_scale: !model()?.guided, size: currentInput() || sizes().length < 2, vae: !vaes().length, sigmas: !curves().length, model: models().length < 2 };
  const weights = Object.keys(settings().adapters ?? {}).map(weight);
  return Object.fromEntries([...Object.entries(AXES), ...weights].filter(([name]) => !unusable[name]));
}

/** What a setting is called that varies on a sheet of this page or of a file. */
export const labelOf = (name) => AXES[name]?.label ?? name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function valuesOf({ axis, label, read }, id) {
  if (axis === "none") return [{ text: "", value: null }];
  const texts = $(id).value.split(",").map((text) => text.trim()).filter(Boolean);
  if (!texts.length) throw new Error(`Write values of ${label.toLowerCase()}, separated by commas.`);
  return texts.map((text) => ({ text, value: read(text) }));
}

function planned() {
  const [x, y] = ["sheet-x", "sheet-y"].map((id) => {
    const axis = { axis: $(id).value, ...axes()[$(id).value] };
    return { fields: [axis.axis], ...axis, values: valuesOf(axis, `${id}-values`) };
  });
  if (x.axis === y.axis) throw new Error("Choose two different settings.");
  if ([x, y].some(({ axis }) => axis === "sigmas") && [x, y].some(({ values }) => values.some(({ value }) => value?.sigmas))) throw new Error("Write the samplers without a schedule type: the other axis has it.");
  if (x.values.length * y.values.length > MOST) throw new Error(`At most ${MOST} images in a sheet.`);
  return { x, y };
}

function vary(job, { axis, set, values }, i) {
  if (axis === "words") return { ...job, prompt: job.prompt.replaceAll(values[0].text, values[i].text) };
  return set ? set(job, values[i].value) : { ...job, [axis]: values[i].value };
}

/** The sheet while it is drawn. Looks like a task to the gallery. */
class Sheet {
  constructor(plan, base, files) {
    Object.assign(this, { plan, base, files, created: Date.now(), message: "", ahead: 0, secondsLeft: null, status: "running" });
    this.cells = plan.y.values.flatMap((_, row) => plan.x.values.map((_, column) => ({ row, column, state: "waits" })));
    this.images = [{ step: 0, steps: this.cells.length, done: false }];
    const sizes = this.cells.map(({ row, column }) => this.#job(row, column)).map(({ width, height }) => [width, height]);
    const [width, height] = [0, 1].map((side) => Math.max(...sizes.map((size) => size[side])));
    this.scale = width <= 160 ? Math.max(1, Math.floor(192 / width)) : 1;
    this.cell = [width * this.scale, height * this.scale];
    this.prepare();
  }

  get over() { return ["done", "failed", "cancelled"].includes(this.status); }

  /** The same once more. */
  again() { return new Sheet(this.plan, this.base, this.files); }

  cancel() {
    this.status = "cancelled";
    for (const { task } of this.cells) task?.cancel();
  }

  retry() { for (const { task } of this.cells) task?.retry(); }

  /** What all its images share, and what varies. */
  get settings() {
    const { n, previews, format, ...shared } = this.base;
    const varied = Object.values(this.plan).filter(({ axis }) => axis !== "none");
    for (const name of varied.flatMap(({ fields }) => fields)) delete shared[name];
    if (shared.options && varied.some(({ axis }) => axis === "sigmas")) {
      const { sigmas, ...options } = shared.options;
      shared.options = options;
    }
    return { ...shared, varied: varied.map(({ label, values }) => [label, values.map(({ text }) => text).join(", ")]) };
  }

  /** Files of its images in the server's folder with the labels; null without any. */
  get saved() {
    const files = this.cells.map(({ task }) => task?.images[0].file ?? null);
    const [columns, rows] = ["x", "y"].map((side) => this.plan[side])
      .map(({ axis, label, values }) => values.map(({ text }) => (axis === "none" ? "" : `${label} ${text}`)));
    return files.some(Boolean) ? { files, columns, rows: this.plan.y.axis === "none" ? [] : rows } : null;
  }

  #job(row, column) {
    const { x, y } = this.plan;
    return vary(vary({ ...this.base, n: 1, previews: false, format: "png" }, x, column), y, row);
  }

  /** The canvas with its labels; cells are empty. */
  prepare() {
    const { x, y } = this.plan;
    const size = Math.max(14, Math.round(this.cell[1] / 16));
    const measure = canvasOf(1, 1).getContext("2d");
    const font = (weight) => `${weight} ${size}px "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif`;
    measure.font = font(400);
    const widest = Math.max(0, ...y.values.map(({ text }) => measure.measureText(text).width));
    const [gap, margin] = [Math.round(size / 2), size * 1.5];
    this.left = margin + (y.axis === "none" ? 0 : Math.ceil(Math.max(widest, measure.measureText(y.label).width * 1.1) + size));
    this.top = margin + (x.axis === "none" ? 0 : size * 3.4);
    this.gap = gap;
    const [columns, rows] = [x.values.length, y.values.length];
    this.canvas = canvasOf(Math.ceil(this.left + columns * (this.cell[0] + gap) - gap + margin), Math.ceil(this.top + rows * (this.cell[1] + gap) - gap + margin));
    const pen = this.pen = this.canvas.getContext("2d");
    pen.fillStyle = "#ffffff";
    pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    pen.fillStyle = "#1f2421";
    pen.textBaseline = "middle";
    pen.font = font(600);
    if (x.axis !== "none") pen.fillText(x.label, this.left, margin + size / 2);
    if (y.axis !== "none") pen.fillText(y.label, margin, this.top - size * 0.9);
    pen.font = font(400);
    x.values.forEach(({ text }, i) => pen.fillText(text, this.at(0, i)[0], margin + size * 2.3, this.cell[0]));
    y.values.forEach(({ text }, i) => pen.fillText(text, margin, this.at(i, 0)[1] + this.cell[1] / 2));
    for (const { row, column } of this.cells) {
      pen.fillStyle = "#eef0ec";
      pen.fillRect(...this.at(row, column), ...this.cell);
    }
  }

  at(row, column) {
    return [this.left + column * (this.cell[0] + this.gap), this.top + row * (this.cell[1] + this.gap)];
  }

  paint(cell, source) {
    this.pen.imageSmoothingEnabled = this.scale === 1;
    const times = Math.min(this.cell[0] / source.width, this.cell[1] / source.height);
    const [left, top] = this.at(cell.row, cell.column);
    const [width, height] = [source.width * times, source.height * times];
    this.pen.fillStyle = "#ffffff";
    this.pen.fillRect(left, top, ...this.cell);
    this.pen.drawImage(source, left + (this.cell[0] - width) / 2, top + (this.cell[1] - height) / 2, width, height);
  }

  failed(cell, text) {
    const [left, top] = this.at(cell.row, cell.column);
    this.pen.fillStyle = "#9b1c1c";
    this.pen.fillText(text, left + 8, top + this.cell[1] / 2, this.cell[0] - 16);
  }

  /** It waits as soon as one of its jobs waits. */
  look() {
    if (this.over) return;
    const waiting = this.cells.find(({ task }) => task?.status === "waiting")?.task;
    this.status = waiting ? "waiting" : "running";
    Object.assign(this, { why: waiting?.why, retryAt: waiting?.retryAt, message: waiting?.message ?? "" });
  }

  async run(changed) {
    const waiting = [...this.cells];
    const worker = async () => {
      while (waiting.length && !this.over) await this.#draw(waiting.shift(), changed);
    };
    await Promise.all(Array.from({ length: AT_ONCE }, worker));
    if (this.over) return null;
    const failures = this.cells.filter(({ state }) => state === "failed");
    if (failures.length === this.cells.length) {
      this.message = failures[0].message;
      this.status = "failed";
      return null;
    }
    this.status = "done";
    return toBlob(this.canvas);
  }

  async #draw(cell, changed) {
    const job = this.#job(cell.row, cell.column);
    const task = cell.task = new Task(job, this.files, { sheet: this });
    let painted = null;
    task.addEventListener("image", ({ detail }) => {
      painted = createImageBitmap(detail.blob).then((bitmap) => this.paint(cell, bitmap));
    });
    task.addEventListener("change", () => { this.look(); changed(); });
    tasks.add(task);
    await task.run(() => bodyOf(job, this.files));
    tasks.delete(task);
    await painted;
    cell.state = task.status;
    cell.message = task.message;
    if (task.status === "failed") this.failed(cell, "failed");
    this.images[0].step += 1;
    changed();
  }
}

function describe() {
  try {
    const { x, y } = planned();
    $("sheet-error").textContent = "";
    $("sheet-count").textContent = `${x.values.length} × ${y.values.length}, ${plural(x.values.length * y.values.length, "image")}`;
    $("sheet-draw").disabled = false;
  } catch (error) {
    $("sheet-error").textContent = error.message;
    $("sheet-count").textContent = "";
    $("sheet-draw").disabled = true;
  }
}

function chooseAxis(id) {
  const axis = $(id).value;
  $(`${id}-values`).value = axes()[axis].propose().join(", ");
  $(`${id}-values`).hidden = axis === "none";
  $(`${id}-hint`).textContent = axis === "words" ? "The first value must occur in the prompt. The others replace it." : "";
  describe();
}

export function openSheet() {
  const offered = Object.entries(axes());
  for (const [id, first] of [["sheet-x", model()?.guided ? "guidance_scale" : "seed"], ["sheet-y", "steps"]]) {
    const chosen = $(id).value || first;
    $(id).replaceChildren(...offered.map(([value, { label }]) => choice(value, label)));
    $(id).value = offered.some(([name]) => name === chosen) ? chosen : first;
    if (!$(`${id}-values`).value) chooseAxis(id);
  }
  describe();
  openDialog($("sheet"));
}

/** `begin` is given the Sheet that was asked for. */
export function prepareSheet(begin) {
  for (const id of ["sheet-x", "sheet-y"]) {
    on(id, "change", () => chooseAxis(id));
    on(`${id}-values`, "input", describe);
  }
  on("sheet-form", "submit", async (event) => {
    event.preventDefault();
    const base = settings();
    if (!base.prompt) {
      $("sheet-error").textContent = "Write a prompt first.";
      return;
    }
    base.seed ??= randomSeed();
    const files = await inputFiles(base);
    if (!files.image) delete base.strength;
    const sheet = new Sheet(planned(), base, files);
    $("sheet").close();
    begin(sheet);
  });
}
