// The server: requests, their errors, the stream of a job's events.
import { remember, remembered } from "./ui.js";

/** The server did not answer at all. */
export class Gone extends Error {}

export class Refused extends Error {
  constructor(status, { message = `The server answered ${status}.`, code = "", param = null } = {}, retryAfter = null) {
    super(code === "starting" ? message.replace("; try again soon", "") : message);  // the page does that
    Object.assign(this, { status, code, param, retryAfter });
  }
}

export const key = { get: () => remembered("key", ""), set: (value) => remember("key", value || null) };

// Seconds after which a stream without a sign of life counts as broken: it has comments in between.
const SILENCE = 60;

// Relative to the page, so that it works below a prefix of a proxy.
const at = (path) => new URL(path.replace(/^\//, ""), new URL(".", document.baseURI));

async function answer(path, init = {}) {
  const headers = new Headers(init.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  let response;
  try {
    response = await fetch(at(path), { ...init, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("The server does not answer.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (!body?.error && response.status >= 502) throw new Gone("The server does not answer.");
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  throw new Refused(response.status, body?.error, Number.isFinite(seconds) ? seconds : null);
}

export const getJson = async (path) => (await answer(path)).json();
export const getBlob = async (path) => (await answer(path)).blob();
export const cancelJob = async (id) => (await answer(`api/jobs/${id}`, { method: "DELETE" })).json();
/** Whether the server shows its folder of images. */
export const hasFolder = () => "history" in document.body.dataset;
const imagePath = (name) => `api/images/${encodeURIComponent(name)}`;
export const imageAddress = (name) => at(imagePath(name)).href;
export const imageFile = (name) => getBlob(imagePath(name));
export const olderImages = (after) => getJson(`api/images${after ? `?after=${encodeURIComponent(after)}` : ""}`);
const move = async (name, method) => (await (await answer(imagePath(name), { method })).json()).name;
/** Move an image into the folder "deleted", or by its name there back: its name where it is then. */
export const deleteImage = (name) => move(name, "DELETE");
export const undeleteImage = (name) => move(name, "POST");
/** Put images of the folder on one sheet, {files, columns, rows}: the name of its file. */
export const saveSheet = async (sheet) => (await sendJson("api/images", sheet)).name;
export const inspect = async (blob) => (await answer("api/inspect", { method: "POST", body: blob })).json();

/** What `control_from` makes of an image. */
export const controlImage = async (kind, blob) => (await answer(`api/control/${kind}`, { method: "POST", body: blob })).blob();

async function sendJson(path, body, more = {}) {
  const headers = { "Content-Type": "application/json", ...more };
  return (await answer(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

export const submitJob = (body, once) => sendJson("api/jobs", body, { "Idempotency-Key": once });

async function withinTime(reader) {
  let timer;
  const silence = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error("silence")), SILENCE * 1000); });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    reader.cancel().catch(() => {});
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** [name, data] of each event. fetch, since EventSource cannot send a key. */
export async function* events(id, signal) {
  const response = await answer(`api/jobs/${id}/events`, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await withinTime(reader).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Gone("The server does not answer.");
    });
    if (done) return;
    const blocks = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = block.split("\n").map((line) => line.split(/: ?(.*)/s));
      const name = fields.find(([field]) => field === "event")?.[1];
      const data = fields.filter(([field]) => field === "data").map(([, text]) => text).join("\n");
      if (name) yield [name, JSON.parse(data)];
    }
  }
}
