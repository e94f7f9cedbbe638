// Elements, numbers and words that the chat and the cache share.

export const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Texts are never read as markup: names and answers come from others. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** Make a part of a drawing. */
export function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

/** A table of texts and elements. */
export function grid(heads, rows) {
  const line = (cells, kind) => el("tr", {}, ...cells.map(cell => el(kind, {}, cell)));
  return el("div", {class: "scroll-x"}, el("table", {}, line(heads, "th"), ...rows.map(cells => line(cells, "td"))));
}

export const count = n => Math.round(n).toLocaleString("en-US");
export function short(n) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (n >= size) return (n / (unit === "k" ? 1e3 : size)).toFixed(n < 10 * size ? 1 : 0) + unit;
  return count(n);
}
export function ago(seconds) {
  if (seconds === null) return "not seen";
  if (seconds < 90) return Math.max(0, seconds).toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}
export function bytes(n) {
  for (const [power, unit] of [[30, "GiB"], [20, "MiB"], [10, "KiB"]])
    if (n >= 2 ** power) return (n / 2 ** power).toFixed(n < 10 * 2 ** power ? 1 : 0) + " " + unit;
  return `${n} B`;
}
export const share = (part, whole) => whole ? 100 * part / whole : 0;
export const percent = (part, whole) => whole ? share(part, whole).toFixed(1) + "%" : "–";

// ---- the server ------------------------------------------------------------------------------

export const key = () => sessionStorage.getItem("key") || "";
export const keepKey = text => sessionStorage.setItem("key", text);
export const headers = more => ({...(key() ? {Authorization: `Bearer ${key()}`} : {}), ...more});

/** Read a response's server-sent events: their data, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      for (const line of part.split("\n"))
        if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

/** What an error's body says, whatever its shape. */
export async function complaint(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return text || `status ${response.status}`; }
}

// ---- where a prompt came from ----------------------------------------------------------------

// In the order in which they lie in a prompt, behind the hit (docs/prefix_cache.md).
const REASONS = {
  bypassed: "the request asked not to read the cache",
  window_rebuilt: "rows of a window are computed again, so that all before them is a hit",
  drafter: "computed again for the drafter",
  external: "another engine was to send it, and did not",
  corrupt: "what the disk had was damaged",
  restore_failed: "it could not be restored",
  restore_declined: "restoring it would have taken longer",
  evicted_from_disk: "the disk had it once, and gave it up",
  window_partial: "rows of some layers were kept there, and the prompt ends too soon to do without the others",
  window_evicted: "rows of a window were evicted",
  window_not_retained: "rows of a window were not kept there",
  state_evicted: "a recurrent state was evicted",
  state_not_retained: "a recurrent state was not kept there",
  evicted: "it was cached once, and evicted",
  first_seen: "never seen before",
  above_last_boundary: "behind the last place at which a prompt can resume",
};
export const inWords = reason => REASONS[reason] || reason.replaceAll("_", " ");
const SOURCES = {pool: "in memory", host: "in host memory", disk: "on disk", external: "at another engine"};

/** The parts of a prompt, in its order: hit, restored, rebuilt, computed. */
export function partsOf(cached, sources, misses, untold) {
  const parts = [];
  const restored = Object.entries(sources || {}).filter(([name]) => name !== "pool");
  const pool = cached - restored.reduce((sum, [, n]) => sum + n, 0);
  if (pool > 0) parts.push({kind: "hit", tokens: pool, why: `hit ${SOURCES.pool}`});
  for (const [name, n] of restored) parts.push({kind: "restored", tokens: n, why: `restored: it lay ${SOURCES[name] || name}`});
  for (const reason of [...Object.keys(REASONS), ...Object.keys(misses).filter(name => !(name in REASONS))])
    if (misses[reason]) parts.push({kind: reason === "window_rebuilt" ? "rebuilt" : "computed", tokens: misses[reason],
      why: `${reason === "window_rebuilt" ? "rebuilt" : "computed"}: ${inWords(reason)}`});
  if (untold > 0) parts.push({kind: "computed", tokens: untold, why: "computed"});
  return parts;
}

/** Draw a prompt's parts as a bar, and below it the one that is looked at. */
export function drawPrompt(parts, summary, cutAt) {
  const total = parts.reduce((sum, part) => sum + part.tokens, 0);
  const line = el("p", {class: "because num"}, ...summary);
  let begin = 0;
  const bar = el("div", {class: "prompt", role: "group", "aria-label": `Prompt of ${count(total)} tokens`});
  for (const part of parts) {
    const place = `tokens ${count(begin)} to ${count(begin + part.tokens)}`;
    const tell = () => line.replaceChildren(el("i", {class: `chip ${part.kind}`}), el("b", {}, count(part.tokens)), ` ${part.why} (${place})`);
    const untell = () => line.replaceChildren(...summary);
    bar.append(el("button", {type: "button", class: part.kind, "aria-label": `${count(part.tokens)} tokens ${part.why}, ${place}`,
      style: {flexGrow: String(Math.max(part.tokens, total / 200)), flexBasis: "0"},
      onmouseenter: tell, onfocus: tell, onclick: tell, onmouseleave: untell, onblur: untell}));
    begin += part.tokens;
  }
  if (cutAt !== undefined && total) bar.append(el("i", {class: "cut", style: {left: `${share(cutAt, total)}%`}}));
  return [bar, line];
}
