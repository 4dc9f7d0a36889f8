// Two images in one place, with a slider between them.
import { samplerLabel } from "./composer.js";
import { crisp, show as showImage, summary } from "./pictures.js";
import { $, on, openDialog } from "./ui.js";

let pair = [];

export function compare(left, right) {
  pair = [left, right];
  show();
  openDialog($("compare"));
  fit();
  $("compare-range").focus();
}

function show() {
  for (const [i, side] of ["left", "right"].entries()) {
    const [record, node] = [pair[i], $(i ? "compare-under" : "compare-over")];
    showImage(node, record);
    node.alt = $(`compare-${side}`).textContent = record.settings.prompt;
    crisp(node, record.width);
    $(`compare-${side}-settings`).textContent = summary(record, samplerLabel(record.settings.sampler));
  }
  slide();
}

function slide() {
  const part = Number($("compare-range").value);
  $("compare-over").style.clipPath = `inset(0 ${100 - part}% 0 0)`;
  $("compare-line").style.left = `${part}%`;
}

function fit() {
  if (!pair.length) return;
  const [width, height] = [Math.max(pair[0].width, pair[1].width), Math.max(pair[0].height, pair[1].height)];
  let scale = Math.min((Math.min(innerWidth, 1000) - 80) / width, (innerHeight - 280) / height);
  if (width <= 160) scale = Math.max(1, Math.floor(scale));
  $("compare-stage").style.width = `${width * scale}px`;
  $("compare-stage").style.height = `${height * scale}px`;
}

export function prepareCompare() {
  on("compare-range", "input", slide);
  on("compare-swap", "click", () => { pair.reverse(); show(); });
  addEventListener("resize", fit);
}
