// Jobs: sent, tried again while the server is away or full, followed, cancelled.
import { Gone, Refused, cancelJob, events, getBlob, getJson, submitJob } from "./api.js";
import { newId, unfinished } from "./store.js";

const pause = (seconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Whether the server answers; those who wait for it wait here. */
export const connection = new class extends EventTarget {
  gone = false;
  retryAt = 0;
  #tries = 0;
  #wake = null;

  lost() {
    if (this.gone) return;
    this.gone = true;
    this.#tries = 0;
    this.#loop();
  }

  async #loop() {
    while (this.gone) {
      const seconds = Math.min(15, 2 ** this.#tries++);
      this.retryAt = Date.now() + seconds * 1000;
      this.#tell();
      const skip = new AbortController();
      this.#wake = () => skip.abort();
      await pause(seconds, skip.signal);
      await this.check();
    }
  }

  /** Ask once now. */
  async check() {
    try {
      await getJson("health");
    } catch (error) {
      if (error instanceof Gone) return this.lost();
    }
    if (this.gone) {
      this.gone = false;
      this.#tell();
    }
  }

  now() { this.#wake?.(); }

  #tell() { this.dispatchEvent(new Event("change")); }

  back(signal) {
    if (!this.gone) return Promise.resolve();
    return new Promise((resolve) => {
      this.addEventListener("change", () => { if (!this.gone) resolve(); }, { signal });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}();

// Browsers open six connections to a server at most: some are left for asking and cancelling.
const STREAMS = 3;
let streams = 0;

const OVER = new Set(["done", "failed", "cancelled"]);

/**
 * One job. status is "sending", "waiting" (with `why`: "gone", "key", "full", "starting" or "later", and `retryAt`) or one of the server's.
 * Tells of "accepted" (the server's `hints` are there), "change" (its status), "progress" (an image is further, detail: index), "image" (one is done, detail: index
 * and blob), "kept" (one is in the gallery since before, detail: index), "refused" (not accepted, detail: the error) and "over".
 * `first`: where the images of the server's job begin, after it forgot the one before; `had`: the images that were done then.
 */
export class Task extends EventTarget {
  constructor(settings, inputs = {}, { once = newId(), id = null, created = Date.now(), sheet = null, first = 0, seeds = [], had = [] } = {}) {
    super();
    Object.assign(this, { settings, inputs, once, id, created, sheet, first, had });
    this.status = id ? "queued" : "sending";
    this.ahead = 0;
    this.secondsLeft = null;
    this.waitsFor = "";
    this.message = "";
    this.images = Array.from({ length: settings.n ?? 1 }, (_, index) => ({
      index, step: 0, steps: settings.steps ?? 0, preview: null, done: index < first, seed: seeds[index] ?? settings.seed ?? null,
    }));
    this.stopping = new AbortController();
  }

  get over() { return OVER.has(this.status); }

  async run(body) {
    await this.#keep();
    this.#skip(this.first);
    while (!this.over) {
      try {
        if (!this.id) await this.#submit(await body());
        await this.#follow();
      } catch (error) {
        await this.#recover(error);
      }
    }
    await unfinished.delete(this.once).catch(() => {});
    this.#tell("over");
  }

  async cancel() {
    if (this.over) return;
    const id = this.id;
    this.#become("cancelled");
    this.stopping.abort();
    if (id) await cancelJob(id).catch(() => {});
  }

  /** Whoever waits stops waiting. */
  retry() { this.waiting?.abort(); }

  async #submit(body) {
    this.#become("sending");
    const { seed } = this.images[this.first];
    const rest = seed === null ? {} : { seed, n: this.images.length - this.first };
    const job = await submitJob({ ...body, ...rest }, this.once);
    if (this.over) {  // cancelled on the way
      await cancelJob(job.id).catch(() => {});
      return;
    }
    this.id = job.id;
    this.hints = job.hints ?? [];
    this.#tell("accepted");
    await this.#take(job);
    await this.#keep();
  }

  /** By its events where a stream is free, else by asking now and then. */
  async #follow() {
    if (this.sheet || streams >= STREAMS) {
      await this.#take(await getJson(`api/jobs/${this.id}`));
      if (!this.over) await pause(this.sheet ? 0.4 : Math.max(1, tasks.size / 5), this.stopping.signal);
      return;
    }
    streams += 1;
    try {
      await this.#listen();
    } finally {
      streams -= 1;
    }
  }

  async #listen() {
    for await (const [name, data] of events(this.id, this.stopping.signal)) {
      if (this.over) return;
      if (name === "step" || name === "preview") this.#progress(name, data);
      else if (name === "image") await this.#fetch(data);
      else await this.#take(data);
    }
    if (!this.over) await this.#take(await getJson(`api/jobs/${this.id}`));
    if (!this.over) await pause(1, this.stopping.signal);
  }

  #progress(name, data) {
    const index = this.first + data.index;
    const image = this.images[index];
    image.step = data.step;
    image.steps = data.steps;
    if (name === "preview") image.preview = data.image;
    else if (data.seconds_left !== null) this.secondsLeft = data.seconds_left;
    this.#tell("progress", { index });
  }

  async #take(job) {
    this.ahead = job.ahead;
    this.secondsLeft = job.seconds_left;
    this.waitsFor = job.waits_for ?? "";
    this.message = job.error?.message ?? "";
    for (const image of job.images) {
      Object.assign(this.images[this.first + image.index] ?? {}, { step: image.step, steps: image.steps, seed: image.seed });
      if (image.url) await this.#fetch(image);
    }
    if (!this.over) this.#become(job.status);
  }

  async #fetch(data) {
    const index = this.first + data.index;
    const image = this.images[index];
    if (image.done) return;
    const blob = await getBlob(data.url);
    if (image.done) return;
    this.again = false;
    Object.assign(image, { done: true, seed: data.seed, width: data.width, height: data.height, file: data.file });
    this.#tell("image", { index, blob });
    await this.#keep();
  }

  /** The images before this one are in the gallery. */
  #skip(first) {
    this.first = first;
    for (const image of this.images.slice(0, first)) {
      image.done = true;
      this.#tell("kept", { index: image.index });
    }
  }

  async #recover(error) {
    if (this.over || error.name === "AbortError") return;
    if (error instanceof Gone) {
      connection.lost();
      return this.#wait("gone", (signal) => connection.back(signal));
    }
    if (!(error instanceof Refused)) {
      this.message = "This browser could not follow the job.";
      console.error(error);
      return this.#become("failed");
    }
    if (error.status === 401) return this.#wait("key", (signal) => pause(3600, signal), error);
    if (error.status === 429 || error.status === 503) {
      const seconds = error.retryAfter ?? 5;
      this.retryAt = Date.now() + seconds * 1000;
      return this.#wait({ queue_full: "full", starting: "starting" }[error.code] ?? "later", (signal) => pause(seconds, signal), error);
    }
    if (error.status === 404 && this.id && !this.again) {  // the server began anew: ask once more
      this.again = true;
      this.id = null;
      const missing = this.images.findIndex(({ done, index }) => !done && !this.had[index]);
      if (missing < 0) return this.#become("done");
      this.#skip(missing);
      await unfinished.delete(this.once).catch(() => {});
      this.once = newId();
      return this.#keep();
    }
    this.message = error.message;
    this.#tell("refused", error);
    this.#become("failed");
  }

  async #wait(why, ready, error = null) {
    this.why = why;
    this.message = error?.message ?? "";
    this.#become("waiting");
    this.waiting = new AbortController();
    this.stopping.signal.addEventListener("abort", () => this.waiting.abort(), { once: true });
    await ready(this.waiting.signal);
    this.message = "";
    if (!this.over) this.#become(this.id ? "queued" : "sending");
  }

  #become(status) {
    this.status = status;
    this.#tell("change");
  }

  #tell(name, detail) { this.dispatchEvent(new CustomEvent(name, { detail })); }

  async #keep() {
    if (this.sheet) return;
    const { once, id, created, settings, inputs, first, had, images } = this;
    const [seeds, done] = [images.map(({ seed }) => seed), images.map((image, i) => image.done || Boolean(had[i]))];
    await unfinished.put({ once, id, created, settings, inputs, first, seeds, had: done }).catch(() => {});
  }
}

/** The jobs that are not over, in the order in which they were asked for. */
export const tasks = new Set();

/** Cancel a job, or the whole sheet that it is of. */
const stop = (task) => (task.sheet ?? task).cancel();

export const cancelAll = () => Promise.all([...tasks].map(stop));

/** Cancel the job that was asked for last; false if there is none. */
export function cancelNewest() {
  const newest = [...tasks].findLast((task) => !task.over);
  if (newest) stop(newest);
  return Boolean(newest);
}
