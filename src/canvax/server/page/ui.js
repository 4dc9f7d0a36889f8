// Small helpers for the document: elements, icons, messages, dialogs.

const PATHS = {
  heart: "M12 20s-7.5-4.6-7.5-10.2A4.3 4.3 0 0 1 12 7.2a4.3 4.3 0 0 1 7.5 2.6C19.5 15.4 12 20 12 20z",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.3 10.5v5.5M13.7 10.5v5.5",
  download: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 19.5h14",
  dice: "M5.5 5.5h13v13h-13zM9.3 8.8a.5.5 0 1 0 .01 0zM14.7 14.2a.5.5 0 1 0 .01 0zM14.7 8.8a.5.5 0 1 0 .01 0zM9.3 14.2a.5.5 0 1 0 .01 0z",
  brush: "M19.5 4.5c-4 1.5-7.5 4.5-9.5 8l1.7 1.7c3.5-2 6.3-5.7 7.8-9.7zM9 13.7c-2.5.3-2.2 3.3-4.5 4.8 2.5 1.5 6.8.5 6.5-2.8",
  eraser: "M8.5 19.5l-4-4 9.5-9.5 6 6-7.5 7.5zM9.5 10.5l6 6M12 19.5h7.5",
  compare: "M12 3.5v17M10 6H4.5v12H10M14 6h5.5v12H14",
  grid: "M4.5 4.5h6v6h-6zM13.5 4.5h6v6h-6zM4.5 13.5h6v6h-6zM13.5 13.5h6v6h-6z",
  lock: "M6.5 11h11v8.5h-11zM8.7 11V8a3.3 3.3 0 0 1 6.6 0v3",
  unlock: "M6.5 11h11v8.5h-11zM8.7 11V7.5a3.3 3.3 0 0 1 6.4-1",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M5.6 18.4l1.1-1.1M17.3 6.7l1.1-1.1",
  moon: "M19.5 14.2A8 8 0 0 1 9.8 4.5a8 8 0 1 0 9.7 9.7z",
  help: "M9 9.2a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 17.3h.01M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17z",
  close: "M6 6l12 12M18 6L6 18",
  check: "M5.5 12.5l4.5 4.5 8.5-10",
  image: "M4.5 5h15v14h-15zM4.5 16l4.5-4.5 4 4 2.5-2.5 4 4M14.5 9h.01",
  plus: "M12 6v12M6 12h12",
  minus: "M6 12h12",
  undo: "M9 5.5L4.5 10 9 14.5M4.5 10h9a5 5 0 0 1 0 10H11",
  redo: "M15 5.5l4.5 4.5-4.5 4.5M19.5 10h-9a5 5 0 0 0 0 10H13",
  swap: "M7.5 5L4 8.5 7.5 12M4 8.5h13M16.5 12l3.5 3.5-3.5 3.5M20 15.5H7",
  left: "M14.5 5.5L8 12l6.5 6.5",
  right: "M9.5 5.5L16 12l-6.5 6.5",
  vary: "M12 4l1.8 5.2L19 11l-5.2 1.8L12 18l-1.8-5.2L5 11l5.2-1.8zM18.5 16v4M16.5 18h4",
  input: "M4.5 12h10M10.5 8l4 4-4 4M14 5h5.5v14H14",
  copy: "M9 9h10.5v10.5H9zM15 9V4.5H4.5V15H9",
  larger: "M13.5 4.5h6v6M19.5 4.5l-6 6M10.5 19.5h-6v-6M4.5 19.5l6-6",
  refresh: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3M19.5 4v4h-4",
  alert: "M12 8v5M12 16.3h.01M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17z",
};

export const $ = (id) => document.getElementById(id);
export const on = (id, kind, act) => $(id).addEventListener(kind, act);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of [["viewBox", "0 0 24 24"], ["class", "glyph"], ["aria-hidden", "true"]]) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function setIcon(button, name) {
  button.dataset.icon = name;
  button.querySelector(".glyph")?.remove();
  button.prepend(icon(name));
}

export function button(name, label, action, { text = false, className = "icon" } = {}) {
  const node = el("button", { type: "button", className, onclick: action });
  if (name) node.append(icon(name));
  if (text) node.append(el("span", { textContent: label }));
  else {
    node.setAttribute("aria-label", label);
    node.title = label;
  }
  return node;
}

export const link = (textContent, onclick, className = "link") => el("button", { type: "button", className, textContent, onclick });

/** An option of a select. */
export const choice = (value, textContent = value) => el("option", { value, textContent });

/** While a dialog is open the rest of the page is inert: messages move into it. */
function bringForward() {
  const host = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  for (const id of ["live", "toasts"]) if ($(id).parentElement !== host) host.append($(id));
}

/** Tell those who cannot see it. */
export function announce(text) {
  bringForward();
  const live = $("live");
  live.textContent = "";
  setTimeout(() => { live.textContent = text; }, 60);
}

/** A short message at the bottom, with what can be done about it; returns what closes it. */
export function toast(text, actions = [], seconds = 8) {
  const node = el("div", { className: "toast" }, el("p", { textContent: text }));
  const close = () => node.remove();
  for (const [label, act] of actions) {
    node.append(link(label, ({ target }) => {
      target.remove();
      if (!node.querySelector(".link")) close(); // each of several offers can be taken
      act();
    }));
  }
  node.append(button("close", "Dismiss", close));
  $("toasts").replaceChildren(node);
  announce(text);
  let timer = setTimeout(close, seconds * 1000);
  node.addEventListener("focusin", () => clearTimeout(timer));
  node.addEventListener("focusout", () => { timer = setTimeout(close, seconds * 1000); });
  return close;
}

export function openDialog(dialog) {
  if (!dialog.open) dialog.showModal();
}

export function prepareDocument() {
  for (const head of document.querySelectorAll(".dialog-head:not(:has([data-close]))")) {
    head.append(el("button", { type: "button", className: "icon", ariaLabel: "Close", "data-close": "", "data-icon": "close" }));
  }
  for (const node of document.querySelectorAll("[data-icon]")) {
    setIcon(node, node.dataset.icon);
    if (node.ariaLabel && !node.title) node.title = node.ariaLabel;
  }
  for (const node of document.querySelectorAll("[data-close]")) {
    node.addEventListener("click", () => node.closest("dialog").close());
  }
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("close", bringForward);
    dialog.addEventListener("pointerdown", (event) => { if (event.target === dialog) dialog.close(); });
  }
}

export function remembered(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(`canvax.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`canvax.${name}`, JSON.stringify(value));
  } catch { /* storage is off or full: nothing is kept */ }
}

export function duration(seconds) {
  if (seconds < 1) return "1 s";  // more words break the line of a small tile
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Copy a text, also on a page of http where there is no navigator.clipboard. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
