// The editor of masks: paint over the input image what is to be drawn anew.
import { canvasOf, tinted } from "./pictures.js";
import { $, announce, on, openDialog, remember, remembered } from "./ui.js";

const DEEPEST = 40;
const CHECKS = { soft: true, only: false };
let base = 1;
let tool = "brush";
let last = null;
let stripes = "";
let pinchZoom = 1;
let cursor = { x: 0, y: 0 };
let past = [];
let future = [];
let use = () => {};
let cancel = () => {};

const canvas = () => $("mask-canvas");
const context = () => canvas().getContext("2d", { willReadFrequently: true });
const radius = () => Number($("mask-size").value) / 2;

/**
 * Edit `mask` (a canvas or null) over the image. `done` is given a canvas, or null where nothing is painted; `cancelled`
 * is called where the editor is closed in any other way.
 */
export async function editMask(blob, mask, done, cancelled = () => {}) {
  const bitmap = await createImageBitmap(blob);
  for (const node of [$("mask-picture"), canvas()]) {
    [node.width, node.height] = [bitmap.width, bitmap.height];
    node.classList.toggle("crisp", bitmap.width <= 160);
  }
  $("mask-picture").getContext("2d").drawImage(bitmap, 0, 0);
  stripes = striped(Math.max(6, Math.round(bitmap.width / 24)));
  if (mask) context().drawImage(mask, 0, 0, bitmap.width, bitmap.height);
  recolour();
  const side = Math.min(bitmap.width, bitmap.height);
  $("mask-size").max = Math.round(side * 0.6);
  $("mask-size").value = Math.round(side / 6);
  $("mask-zoom").value = 1;
  [past, future, use, cancel] = [[], [], done, cancelled];
  if (!mask) for (const [name, usual] of Object.entries(CHECKS)) $(`mask-${name}`).checked = remembered(`${name}-mask`, usual);
  cursor = { x: bitmap.width / 2, y: bitmap.height / 2 };
  choose("brush");
  openDialog($("mask"));
  fit();
  showButtons();
  canvas().focus();
}

function fit() {
  if (!$("mask").open) return;
  const { width, height } = canvas();
  const room = $("mask-scroll");
  base = Math.min((room.clientWidth - 32) / width, (room.clientHeight - 32) / height);
  if (width <= 160) base = Math.max(1, Math.floor(base));
  zoom();
}

/** What is in the middle of the view stays there. */
function zoom() {
  const by = base * Number($("mask-zoom").value);
  const view = $("mask-scroll");
  const middle = [(view.scrollLeft + view.clientWidth / 2) / view.scrollWidth, (view.scrollTop + view.clientHeight / 2) / view.scrollHeight];
  $("mask-stage").style.width = `${canvas().width * by}px`;
  $("mask-stage").style.height = `${canvas().height * by}px`;
  view.scrollLeft = middle[0] * view.scrollWidth - view.clientWidth / 2;
  view.scrollTop = middle[1] * view.scrollHeight - view.clientHeight / 2;
  $("mask-zoom-out").textContent = `${Math.round(Number($("mask-zoom").value) * 100)} %`;
  $("mask-size-out").textContent = `${$("mask-size").value} px`;
  showCursor();
}

function showCursor() {
  const by = $("mask-stage").clientWidth / canvas().width;
  const style = $("mask-cursor").style;
  style.width = style.height = `${radius() * 2 * by}px`;
  style.left = `${cursor.x * by}px`;
  style.top = `${cursor.y * by}px`;
}

function choose(name) {
  tool = name;
  for (const one of ["brush", "eraser"]) $(`mask-${one}`).ariaPressed = String(one === name);
}

const state = () => context().getImageData(0, 0, canvas().width, canvas().height);

function keep() {
  past.push(state());
  if (past.length > DEEPEST) past.shift();
  future = [];
}

function back(from, to) {
  if (!from.length) return;
  to.push(state());
  context().putImageData(from.pop(), 0, 0);
  showButtons();
}

const painted = () => state().data.some((value, i) => i % 4 === 3 && value > 0);

function showButtons() {
  $("mask-undo").disabled = !past.length;
  $("mask-redo").disabled = !future.length;
  const any = painted();
  $("mask-use").textContent = any ? "Use the mask" : "Use without a mask";
  $("mask-clear").disabled = !any;
}

function stroke(from, to) {
  const pen = context();
  pen.globalCompositeOperation = tool === "brush" ? "source-over" : "destination-out";
  pen.strokeStyle = stripes;
  pen.lineCap = pen.lineJoin = "round";
  pen.lineWidth = radius() * 2;
  pen.beginPath();
  pen.moveTo(from.x, from.y);
  pen.lineTo(to.x + 0.001, to.y);
  pen.stroke();
  pen.globalCompositeOperation = "source-over";
}

/** Stripes of two colours: one of them shows on any image. */
function striped(side) {
  const tile = canvasOf(side, side);
  const pen = tile.getContext("2d");
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      pen.fillStyle = (x + y) % side < side / 2 ? "#d81b60" : "#ffd9e6";
      pen.fillRect(x, y, 1, 1);
    }
  }
  return context().createPattern(tile, "repeat");
}

function recolour() {
  const pen = context();
  pen.globalCompositeOperation = "source-in";
  pen.fillStyle = stripes;
  pen.fillRect(0, 0, canvas().width, canvas().height);
  pen.globalCompositeOperation = "source-over";
}

/** Each pixel painted or not: the edges of strokes are smoothed by the canvas. */
function harden() {
  const pixels = state();
  for (let i = 3; i < pixels.data.length; i += 4) pixels.data[i] = pixels.data[i] > 127 ? 255 : 0;
  context().putImageData(pixels, 0, 0);
  recolour();
  showButtons();
}

function place(event) {
  const box = canvas().getBoundingClientRect();
  return { x: ((event.clientX - box.left) / box.width) * canvas().width, y: ((event.clientY - box.top) / box.height) * canvas().height };
}

/** White where it is painted, on nothing. */
const result = () => (painted() ? tinted(canvas(), "white") : null);

function invert() {
  keep();
  const pixels = state();
  for (let i = 3; i < pixels.data.length; i += 4) pixels.data[i] = 255 - pixels.data[i];
  context().putImageData(pixels, 0, 0);
  harden();
}

function clear() {
  keep();
  context().clearRect(0, 0, canvas().width, canvas().height);
  showButtons();
}

function change(name, by) {
  $(`mask-${name}`).value = Number($(`mask-${name}`).value) + by;
  zoom();
}

function onKey(event) {
  const inField = event.target.matches("input");
  if (event.ctrlKey || event.metaKey) {
    const key = event.key.toLowerCase();
    if (key === "z" && !event.shiftKey) back(past, future);
    else if (key === "y" || key === "z") back(future, past);
    else return;
    return event.preventDefault();
  }
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (arrows && event.target === canvas()) {
    const far = event.shiftKey ? Math.max(1, Math.round(radius() * 2)) : 1;
    const from = cursor;
    cursor = {
      x: Math.max(0, Math.min(canvas().width, cursor.x + arrows[0] * far)),
      y: Math.max(0, Math.min(canvas().height, cursor.y + arrows[1] * far)),
    };
    if (event.altKey) { keep(); stroke(from, cursor); harden(); }
    showCursor();
    $("mask-cursor").scrollIntoView({ block: "nearest", inline: "nearest" });
    return event.preventDefault();
  }
  if (event.key === " " && event.target === canvas()) {
    keep();
    stroke(cursor, cursor);
    harden();
    announce(tool === "brush" ? "Painted" : "Erased");
    return event.preventDefault();
  }
  if (inField) return;
  const act = {
    b: () => choose("brush"), e: () => choose("eraser"), "[": () => change("size", -1), "]": () => change("size", 1),
    "+": () => change("zoom", 0.5), "=": () => change("zoom", 0.5), "-": () => change("zoom", -0.5), 0: () => { $("mask-zoom").value = 1; zoom(); },
  }[event.key];
  if (act) { event.preventDefault(); act(); }
}

const fingers = new Map();

/** Two fingers move and enlarge the image; what the first has painted until then is taken back. */
function pinch(event) {
  const before = spread();
  fingers.set(event.pointerId, event);
  const after = spread();
  $("mask-scroll").scrollBy(before.x - after.x, before.y - after.y);
  $("mask-zoom").value = pinchZoom *= after.apart / before.apart;
  zoom();
}

function spread() {
  const [a, b] = [...fingers.values()];
  return { x: (a.clientX + b.clientX) / 2, y: (a.clientY + b.clientY) / 2, apart: Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) || 1 };
}

/** Drag with the middle button, as a wheel is pressed to scroll. */
function drag(event) {
  $("mask-scroll").scrollBy(-event.movementX, -event.movementY);
}

function preparePointer() {
  canvas().addEventListener("pointerdown", (event) => {
    canvas().setPointerCapture(event.pointerId);
    if (event.button > 0) return;
    fingers.set(event.pointerId, event);
    if (fingers.size === 2) {
      if (last) { last = null; back(past, []); }
      pinchZoom = Number($("mask-zoom").value);
    }
    if (fingers.size > 1) return;
    keep();
    last = cursor = place(event);
    stroke(last, last);
    showCursor();
  });
  canvas().addEventListener("pointermove", (event) => {
    if (fingers.size === 2) return pinch(event);
    if (event.buttons & 4) return drag(event);
    cursor = place(event);
    if (last) {
      for (const point of event.getCoalescedEvents?.() ?? [event]) {
        const to = place(point);
        stroke(last, to);
        last = to;
      }
    }
    showCursor();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas().addEventListener(name, (event) => {
      fingers.delete(event.pointerId);
      if (last) { last = null; harden(); }
    });
  }
}

export function prepareMask() {
  preparePointer();
  on("mask", "keydown", onKey);
  on("mask-scroll", "wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    change("zoom", event.deltaY < 0 ? 0.25 : -0.25);
  }, { passive: false });
  on("mask-brush", "click", () => choose("brush"));
  on("mask-eraser", "click", () => choose("eraser"));
  for (const id of ["mask-size", "mask-zoom"]) on(id, "input", zoom);
  on("mask-undo", "click", () => back(past, future));
  on("mask-redo", "click", () => back(future, past));
  on("mask-invert", "click", invert);
  on("mask-clear", "click", clear);
  for (const name of Object.keys(CHECKS)) on(`mask-${name}`, "change", ({ target }) => remember(`${name}-mask`, target.checked));
  on("mask-use", "click", () => { cancel = () => {}; $("mask").close(); use(result()); });
  on("mask", "close", () => cancel());
  addEventListener("resize", fit);
}
