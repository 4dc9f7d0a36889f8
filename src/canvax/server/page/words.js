// Embeddings (textual inversions) of the server's folder.
import { replace } from "./prompt.js";
import { $, el, on, plural } from "./ui.js";

/** [{name, fault}]: all of the folder; `fault` says why one cannot be used with the model, "" if it can. */
let words = [];
/** Where a chosen name goes: the text that was last written in. */
let area = null;

const whose = () => ("history" in document.body.dataset ? "your folder" : "the server's folder");
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** Those that a text names, as the server finds them: whole words, in any case. */
const named = (text) => words.filter(({ name }) => new RegExp(`(?<![\\p{L}\\p{N}_])${escaped(name)}(?![\\p{L}\\p{N}_])`, "iu").test(text));

/** Say below a prompt which embeddings it names, or why they are read as text. */
export function showWords() {
  const most = 8;
  const found = [["prompt", "words-note"], ["negative", "negative-words-note"]].flatMap(([id, note]) => {
    const here = named($(id).value);
    $(note).replaceChildren(...here.slice(0, most).map(({ name, fault }) => el("li", {
      textContent: fault ? `${name} is read as text: ${fault}` : `${name}: embedding of ${whose()}`,
    })));
    return here;
  });
  $("embeddings-text").textContent = [...new Set(found.filter(({ fault }) => !fault).map(({ name }) => name))].join(", ");
}

/** Whether a hint of the server says what stands under the prompt already. */
export const saidOfWord = (hint) => words.some(({ name, fault }) => fault && hint.toLowerCase().includes(`'${name.toLowerCase()}', which is read as text`));

/** The embeddings for a model. */
export function offerWords(listed) {
  words = listed;
  const left = words.filter(({ fault }) => fault);
  const chip = ({ name }) => el("li", {}, el("button", { type: "button", textContent: name, title: `Write ${name}`, onclick: () => write(name) }));
  $("embedding-list").replaceChildren(...words.filter(({ fault }) => !fault).map(chip));
  $("embeddings").hidden = !words.length;
  $("embeddings-left").hidden = !left.length;
  $("embeddings-left-text").textContent = `${plural(left.length, "file")} cannot be used with this model`;
  $("embeddings-left-list").replaceChildren(...left.flatMap(({ name, fault }) => [el("dt", { textContent: name }), el("dd", { textContent: fault })]));
  showWords();
}

/** A name behind the text, or at the cursor of the text that was last written in. */
function write(name) {
  const { value, selectionStart: start, selectionEnd: end } = area;
  const [before, after] = [value.slice(0, start), value.slice(end)];
  const comma = before.trim() && !/[,(\s]$/.test(before) ? ", " : "";
  area.focus();
  replace(area, start, end, `${comma}${name}${after && !/^[,)\s]/.test(after) ? ", " : ""}`);
}

export function prepareWords() {
  area = $("prompt");
  for (const id of ["prompt", "negative"]) on(id, "focus", () => { area = $(id); });
}
