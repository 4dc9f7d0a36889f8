// Blobs, canvases and texts of images. Without fetch on data: and blob: addresses, which the page's policy forbids.
import { imageAddress, imageFile, key } from "./api.js";

export function canvasOf(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

export const toBlob = (canvas) => new Promise((resolve, reject) => {
  canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The image is too large."))), "image/png");
});

export const toDataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** Show an image, or nothing, on a canvas, which gets its size. */
export function paint(canvas, bitmap) {
  canvas.hidden = !bitmap;
  if (!bitmap) return;
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
}

/** What is painted on a canvas, in another colour. */
export function tinted(painted, colour) {
  const canvas = copyOf(painted);
  const context = canvas.getContext("2d");
  context.globalCompositeOperation = "source-in";
  context.fillStyle = colour;
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/** How much an image is enlarged to fill width x height. */
export const scaleTo = (image, width, height) => Math.max(width / image.width, height / image.height);

/** A canvas of width x height with the image in its middle, which by default fills it; what does not fit is cut. */
export function centred(image, width, height, scale = scaleTo(image, width, height), smooth = true) {
  const canvas = canvasOf(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.imageSmoothingEnabled = smooth;
  const [w, h] = [image.width * scale, image.height * scale];
  context.drawImage(image, (width - w) / 2, (height - h) / 2, w, h);
  return canvas;
}

const copyOf = (image) => centred(image, image.width, image.height);

/** The image cut and scaled to fill width x height. */
export async function fitted(blob, width, height) {
  const bitmap = await createImageBitmap(blob);
  return bitmap.width === width && bitmap.height === height ? blob : toBlob(centred(bitmap, width, height));
}

/** The whole image, its longer side no longer than this. */
export async function within(blob, side) {
  const { width, height } = await createImageBitmap(blob);
  const scale = Math.min(1, side / Math.max(width, height));
  return fitted(blob, Math.max(2, Math.round(width * scale)), Math.max(2, Math.round(height * scale)));
}

/** A black and white mask as the editor has it: white on nothing. */
export async function paintedFrom(blob) {
  const canvas = copyOf(await createImageBitmap(blob));
  const context = canvas.getContext("2d");
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < pixels.data.length; i += 4) pixels.data.set([255, 255, 255, pixels.data[i] > 127 ? 255 : 0], i);
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Tiny images are enlarged without smoothing, so that their pixels stay what they are. */
export function crisp(node, width) {
  node.classList.toggle("crisp", width <= 32);
}

/** The file of an image: the browser keeps it, or it is in the server's folder. */
export const blobOf = async (record) => record.blob ?? imageFile(record.file);

const urls = new Map();

/** Show an image in an <img>. Its address is made once for each record. */
export async function show(node, record) {
  node.dataset.shown = record.id;
  if (!urls.has(record.id)) {
    const direct = !record.blob && !key.get();  // an <img> cannot send a key
    urls.set(record.id, direct ? imageAddress(record.file) : blobOf(record).then((blob) => URL.createObjectURL(blob)));
  }
  const url = urls.get(record.id);
  if (typeof url === "string") {
    node.src = url;
    return;
  }
  const made = await url.catch(() => "");
  urls.set(record.id, made);
  if (node.dataset.shown === record.id) node.src = made;
}

export function forgetUrl(id) {
  if (urls.get(id)?.startsWith?.("blob:")) URL.revokeObjectURL(urls.get(id));
  urls.delete(id);
}

export function fileName(record) {
  const words = record.settings.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 48);
  const kind = record.blob?.type.split("/")[1] ?? record.file?.split(".").at(-1).toLowerCase() ?? "png";
  return `${words || "image"}-${record.kind === "sheet" ? "sheet" : record.settings.seed}.${kind === "jpeg" ? "jpg" : kind}`;
}

export function summary({ settings, width, height }, sampler) {
  const parts = [`seed ${settings.seed}`, `${width} × ${height}`];
  if (settings.steps) parts.push(`${settings.steps} steps`);
  if (settings.guidance_scale) parts.push(`guidance ${settings.guidance_scale}`);
  if (sampler) parts.push(sampler);
  return parts.join(" · ");
}
