// The keyboard.
import { cancelAll, cancelNewest } from "./tasks.js";
import { $, announce, el, on, openDialog, remember, remembered } from "./ui.js";

const TABLE = [
  ["In the prompt", [["Enter", "Generate"], ["Shift Enter", "New line"], ["Ctrl ↑ ↓", "Weight of the words"], ["<lora:", "Names of adapters"]]],
  ["Everywhere", [["Ctrl Enter", "Generate"], ["/", "Write the prompt"], ["h", "Go to the images"], ["s", "Search"], ["c", "Cancel the newest job"],
    ["Shift C", "Cancel all"], ["z", "Undo a deletion"], ["l", "Keep the seed, or not"], ["i", "Open an image"], ["m", "Sheet"], ["t", "Light or dark"], ["?", "This list"]]],
  ["On an image", [["Arrows", "Next image"], ["Enter", "Open"], ["x", "Select"], ["f", "Favourite"], ["v", "New seed"], ["Shift V", "Variation"],
    ["e", "Upscale"], ["u", "Add as input or reference"], ["p", "Paint a mask"], ["c", "Compare"], ["r", "Restore its settings"], ["d", "Save"], ["Delete", "Delete, with undo"]]],
  ["In the mask editor", [["Arrows", "Move the brush"], ["Space", "Paint there"], ["Alt Arrows", "Paint along"], ["b  e", "Brush, eraser"], ["[  ]", "Smaller, larger"],
    ["+  −  0", "Zoom"], ["Ctrl Z", "Undo"], ["Ctrl Shift Z", "Redo"]]],
];

const keysOf = (text) => text.split(" ").filter(Boolean).map((key) => el("kbd", { textContent: key }));

function fillHelp() {
  $("help-list").replaceChildren(...TABLE.map(([title, rows]) => el("section", {}, el("h3", { textContent: title }),
    el("dl", {}, ...rows.map(([keys, what]) => el("div", {}, el("dt", {}, ...keysOf(keys)), el("dd", { textContent: what })))))));
}

/** `global` and `onImage` map keys to actions; the second are given the record's id that `current()` names. */
export function prepareKeys({ global, onImage, current, draw }) {
  fillHelp();
  $("help-on").checked = remembered("keys", true);
  on("help-on", "change", () => remember("keys", $("help-on").checked));
  on("open-help", "click", () => openDialog($("help")));
  const all = {
    ...global,
    "?": () => openDialog($("help")),
    "/": () => { $("prompt").focus(); $("prompt").select(); },
    s: () => $("search").focus(),
    c: () => cancelNewest() || announce("Nothing is being generated"),
    C: cancelAll,
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("textarea, select, input:not([type=checkbox], [type=range])");
    const dialog = [...document.querySelectorAll("dialog[open]")].at(-1);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !dialog) {
      event.preventDefault();
      return draw();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !$("help-on").checked || event.defaultPrevented) return;
    if (dialog && dialog !== $("viewer")) return;
    const id = current();
    const act = (id && onImage[event.key]) || ((!dialog || event.key === "?") && all[event.key]);
    if (!act) return;
    event.preventDefault();
    act(id);
  });
}
