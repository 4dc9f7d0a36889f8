// Writing a prompt: weights by the arrow keys, names of adapters, brackets that are read as text.
import { adapterNames } from "./beside.js";
import { $, announce, el, on } from "./ui.js";

const MOST = 8;

/** How each syntax writes a weight, and how it is found around selected words. */
const WEIGHTS = {
  a1111: { write: (words, weight) => `(${words}:${weight})`, after: /^:(\d*\.?\d+)\)/ },
  compel: { write: (words, weight) => `(${words})${weight}`, after: /^\)(\d*\.?\d+)/ },
};
WEIGHTS.comfy = WEIGHTS.a1111;

/** Brackets that mean something elsewhere; a syntax that reads them. */
const MEANT = [
  [/\([^()]+:\s*\d*\.?\d+\s*\)/, "a1111", "A1111"], [/\[[^[\]]+[|:][^[\]]*\]/, "a1111", "A1111"],
  [/\([^()]+\)\d*\.\d+|\w\+{1,3}(?=[\s,]|$)/, "compel", "Compel"],
];

/** A language model reads none. */
const readsWeights = () => !$("syntax-field").hidden;

/** Say which part of the prompt is read as text though it looks like a weight. */
export function showSyntax() {
  const text = `${$("prompt").value}\n${$("negative").value}`;
  const found = readsWeights() && $("syntax").value === "plain" && MEANT.map(([pattern, syntax, label]) => [text.match(pattern)?.[0], syntax, label]).find(([part]) => part);
  $("syntax-note").hidden = !found;
  if (!found) return;
  $("syntax-found").textContent = `${found[0]} is read as text.`;
  $("syntax-use").textContent = `Read it as ${found[2]}`;
  $("syntax-use").dataset.syntax = found[1];
}

/** Replace a part of a field, so that the browser can undo it. */
export function replace(area, start, end, text) {
  area.setSelectionRange(start, end);
  if (!document.execCommand("insertText", false, text)) {
    area.setRangeText(text, start, end, "end");
    area.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

/** Change the weight of the selected words, or of the word at the cursor. */
function weigh(area, by) {
  if ($("syntax").value === "plain") $("syntax").value = "a1111";
  const { write, after } = WEIGHTS[$("syntax").value];
  const text = area.value;
  let [start, end] = [area.selectionStart, area.selectionEnd];
  if (start === end) {
    start -= text.slice(0, start).match(/[^\s,()[\]:]*$/)[0].length;
    end += text.slice(end).match(/^[^\s,()[\]:]*/)[0].length;
    const group = text.slice(0, start).lastIndexOf("(");  // of several words
    if (group >= 0 && !text.slice(group, start).includes(")")) {
      const close = text.slice(start).search(after.source.startsWith("^:") ? /:\d*\.?\d+\)/ : /\)\d*\.?\d+/);
      if (close >= 0 && !text.slice(start, start + close).includes("(")) [start, end] = [group + 1, start + close];
    }
  }
  const words = text.slice(start, end).trim();
  if (!words) return;
  const [, before = "1"] = (text[start - 1] === "(" && text.slice(end).match(after)) || [];
  const whole = text[start - 1] === "(" && after.test(text.slice(end));
  const weight = Math.max(0, Math.round((Number(before) + by) * 100) / 100);
  const written = weight === 1 ? words : write(words, weight);
  if (whole) [start, end] = [start - 1, end + text.slice(end).match(after)[0].length];
  replace(area, start, end, written);
  const at = start + (weight === 1 ? 0 : 1);
  area.setSelectionRange(at, at + words.length);
  announce(`${words}, weight ${weight}`);
}

// ---- completion of <lora:

const unfinished = (area) => area.value.slice(0, area.selectionStart).match(/<lora:([^<>:]*)$/)?.[1];
const choices = () => [...$("completions").children];
const chosen = () => choices().find((node) => node.ariaSelected === "true");

function complete(area, name) {
  const start = area.selectionStart - unfinished(area).length;
  replace(area, start, area.selectionStart, `${name}:1>`);
  showCompletions(area);
}

function choose(area, node) {
  for (const other of choices()) other.ariaSelected = String(other === node);
  if (node) area.setAttribute("aria-activedescendant", node.id);
  else area.removeAttribute("aria-activedescendant");
  node?.scrollIntoView({ block: "nearest" });
}

/** Names with a part in them: first those that it begins, without folders too. */
function completed(part) {
  const within = adapterNames().filter((name) => name.toLowerCase().includes(part));
  const begins = within.filter((name) => `/${name.toLowerCase()}`.includes(`/${part}`));
  return [...new Set([...begins, ...within])].slice(0, MOST);
}

function showCompletions(area) {
  const part = unfinished(area)?.toLowerCase();
  const names = part === undefined ? [] : completed(part);
  $("completions").replaceChildren(...names.map((name, i) => el("li", {
    id: `completion-${i}`, role: "option", textContent: name, onmousedown: (event) => { event.preventDefault(); complete(area, name); },
  })));
  $("completions").hidden = !names.length;
  choose(area, choices()[0]);
}

function onKey(event) {
  const area = event.target;
  if (readsWeights() && (event.ctrlKey || event.metaKey) && /^Arrow(Up|Down)$/.test(event.key)) {
    event.preventDefault();
    return weigh(area, event.key === "ArrowUp" ? 0.1 : -0.1);
  }
  if ($("completions").hidden || area !== $("prompt")) return;
  const all = choices();
  const at = all.indexOf(chosen());
  if (event.key === "ArrowDown" || event.key === "ArrowUp") choose(area, all[(at + (event.key === "ArrowDown" ? 1 : all.length - 1)) % all.length]);
  else if (event.key === "Enter" || event.key === "Tab") complete(area, chosen().textContent);
  else if (event.key === "Escape") $("completions").hidden = true;
  else return;
  event.preventDefault();
}

export function preparePrompt() {
  for (const id of ["prompt", "negative"]) on(id, "keydown", onKey);
  on("prompt", "input", () => showCompletions($("prompt")));
  on("prompt", "blur", () => { $("completions").hidden = true; });
  on("syntax-use", "click", () => {
    $("syntax").value = $("syntax-use").dataset.syntax;
    $("syntax").dispatchEvent(new Event("input", { bubbles: true }));
    $("prompt").focus();
  });
}
