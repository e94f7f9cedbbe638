// The cache as it is now: facts, tiers, tenants, the tree of prefixes, the last requests.

import {$, ago, bytes, complaint, count, drawPrompt, el, events, grid, headers, inWords, key, partsOf, percent, shape,
  share, short} from "./dom.js";

const TIERS = ["held", "live", "pinned", "regular", "warm", "cold", "spare", "filler", "scratch"];
const NAMES = {held: "held by requests", live: "left by running ones", pinned: "pinned", regular: "regular",
  warm: "promising", cold: "superseded", spare: "spare", filler: "filler", scratch: "free"};
const STATES = {ready: "ready", opening: "opening", reading_weights: "reading the weights once",
  off: "off: see the log", read_only: "read only", reads_paused: "reads failed: paused",
  writes_stopped: "writes failed: stopped"};
// What a prompt's tokens came from, from the bottom of a column to its top.
const SOURCES = [["pool", "hit", "hit in memory"], ["host", "restored", "from host memory"], ["disk", "disk", "from disk"],
  ["external", "other", "from another engine"], ["computed", "computed", "computed"]];
const GAP = 3, ROW = 31, TOP = 24;
let last = null, chosen = null, paused = false, records = false, following = null, asked = null;

// ---- figures -----------------------------------------------------------------------------------

function drawFacts(view) {
  const t = view.totals, tree = view.tree, p = view.policy;
  const facts = [
    [percent(t.cached_tokens, t.prompt_tokens), "of prompt tokens hit",
      `${short(t.cached_tokens)} of ${short(t.prompt_tokens)} in ${count(t.requests)} requests`],
    [count(view.num_running), "requests running", `${count(view.num_waiting)} waiting`],
    [short(tree.num_tokens), "tokens can be hit",
      tree.num_unreachable ? `${short(tree.num_unreachable)} more have lost their beginning` : `by units of ${view.unit}`],
    [percent(view.tiers.held || 0, view.num_blocks), "of blocks held",
      `${count(view.tiers.held || 0)} of ${count(view.num_blocks)}, each ${bytes(view.block_bytes)}`],
  ];
  if (p.rule) facts.push([p.interval ? count(p.interval) : "none", "checkpoint interval", `gives up by rule “${p.rule}”`]);
  $("facts").replaceChildren(...facts.map(([big, label, note]) => el("div", {class: "card"},
    el("div", {class: "label"}, label), el("div", {class: "fact num"}, big), el("div", {class: "label num"}, note))));
}

function drawHistory(view) {
  const width = Math.max(200, $("history").clientWidth), height = 84, low = height - 16, num = 60;
  const now = Math.floor(view.now_s / view.span_s), spans = view.history.filter(span => now - span.number < num);
  const svg = shape("svg", {width, height, role: "img",
    "aria-label": `Prompt tokens of the last ${num * view.span_s / 60} minutes by where they came from`});
  const most = Math.max(1, ...spans.map(span => span.prompt_tokens)), step = width / num;
  for (const span of spans) {
    const x = width - (now - span.number + 1) * step;
    const cached = Object.values(span.sources).reduce((a, b) => a + b, 0);
    const counts = {...span.sources, computed: span.prompt_tokens - cached};
    const column = shape("g", {}, svg);
    let y = low;
    for (const [name, kind] of SOURCES) if (counts[name]) {
      const tall = counts[name] / most * (low - 14);
      y -= tall;
      shape("rect", {x: x + .5, y, width: Math.max(1, step - 1), height: tall, class: kind}, column);
    }
    shape("title", {}, column).textContent = `${ago((now - span.number) * view.span_s)} ago: `
      + SOURCES.filter(([name]) => counts[name]).map(([name, , words]) => `${count(counts[name])} ${words}`).join(", ");
  }
  shape("line", {x1: 0, x2: width, y1: low + .5, y2: low + .5, class: "grid"}, svg);
  const say = (x, y, text, anchor) => { shape("text", {x, y, class: "axis", "text-anchor": anchor}, svg).textContent = text; };
  say(0, height - 3, `${num * view.span_s / 60} min ago`, "start");
  say(width, height - 3, "now", "end");
  say(0, 10, `at most ${short(most)} tokens in ${view.span_s} s`, "start");
  $("history").replaceChildren(svg);
  const used = SOURCES.filter(([name]) => name === "pool" || name === "computed" || view.sources[name]);
  $("history-legend").replaceChildren(...used.map(([name, kind, words]) => {
    const n = name === "computed" ? view.totals.prompt_tokens - view.totals.cached_tokens : view.sources[name] || 0;
    return el("span", {}, el("i", {class: `chip ${kind}`}), words, el("span", {class: "num"}, short(n)));
  }));
}

function drawPool(view) {
  const present = TIERS.filter(tier => view.tiers[tier]);
  $("pool").replaceChildren(...present.map(tier => el("div", {class: `t-${tier}`, title: `${NAMES[tier]}: ${count(view.tiers[tier])}`,
    style: {width: `${share(view.tiers[tier], view.num_blocks)}%`}})));
  $("tiers").replaceChildren(...present.map(tier => el("span", {}, el("i", {class: `chip t-${tier}`}), NAMES[tier],
    el("span", {class: "num"}, count(view.tiers[tier])))));
}

function drawShares(view) {
  $("tenants").hidden = !view.shares.length;
  const room = view.num_blocks;
  $("shares").replaceChildren(grid(["tenant", "in use", "held", "cached", "guaranteed", "at most"], view.shares.map(one => {
    const meter = el("div", {class: "meter", title: `${percent(one.held + one.cached, room)} of the pool`},
      el("div", {class: "t-held", style: {width: `${share(one.held, room)}%`}}),
      el("div", {class: "t-regular", style: {width: `${share(one.cached, room)}%`}}),
      el("i", {class: "line", style: {left: `${Math.min(99, share(one.guaranteed, room))}%`, top: "0", bottom: "0"}}));
    return [one.tenant || "all others", meter, count(one.held), count(one.cached), count(one.guaranteed), percent(one.at_most, room)];
  })));
}

function drawBehind(view) {
  const o = view.offload;
  $("behind").hidden = !o;
  if (!o) return;
  $("places").replaceChildren(...Object.entries(o.tiers).map(([name, t]) => el("div", {},
    el("b", {}, name === "host" ? "host memory" : name), el("span", {class: "soft"}, ` ${STATES[t.state] || t.state}`),
    el("div", {class: "meter", title: `${bytes(t.live_bytes)} can be found`},
      el("div", {class: "hit", style: {width: `${share(t.used_bytes, t.max_bytes)}%`}})),
    el("div", {class: "label num"}, `${bytes(t.used_bytes)} of ${bytes(t.max_bytes)}; ${count(view.sources[name] || 0)} tokens hit; `
      + `${count(t.objects.state || 0)} checkpoints, ${count(t.objects.rows || 0)} row groups; `
      + `read ${bytes(t.read_bytes)}, written ${bytes(t.written_bytes)}`))));
  const told = counts => Object.entries(counts).map(([name, n]) => `${name.replaceAll("_", " ")} ${count(n)}`).join(", ") || "nothing yet";
  const warm = o.warm_start;
  const lines = [`kept: ${told(o.stores)}`, `brought back: ${told(o.restores)}`];
  if (warm.state !== "off") lines.push(`warm start ${warm.state}: ${count(warm.num_prefixes)} prefixes, ${count(warm.num_tokens)} tokens`
    + (warm.num_left ? `, ${count(warm.num_left)} to come` : ""));
  if (o.num_loading) lines.push(`${count(o.num_loading)} on the way to the pool`);
  if (o.queued_bytes) lines.push(`${bytes(o.queued_bytes)} on the way to the disk`);
  if (o.num_corrupt) lines.push(`${count(o.num_corrupt)} objects were corrupt`);
  $("outcomes").replaceChildren(...lines.map(line => el("span", {}, line)));
}

// ---- the tree of prefixes ----------------------------------------------------------------------

function heatColor(heat, most) {
  const x = most > 0 ? Math.log1p(heat) / Math.log1p(most) : 0;
  // From slate through yellow to red; a branch that nobody hit stays grey.
  const hue = x < 0.02 ? 220 : 54 - 48 * x, strength = x < 0.02 ? 16 : 60 + 26 * x;
  return `hsl(${hue} ${strength}% calc(var(--heat-light) + ${8 - 14 * x}%))`;
}

function layOut(branches) {
  const nodes = branches.map((branch, i) => ({...branch, i, children: []}));
  const roots = [];
  for (const node of nodes) (node.parent < 0 ? roots : nodes[node.parent].children).push(node);
  const by = {hits: (a, b) => b.hits - a.hits, used: (a, b) => (a.idle_s ?? 1e12) - (b.idle_s ?? 1e12)}[$("order").value];
  let row = 0;
  const place = node => {
    if (by) node.children.sort(by);
    node.row = row;
    node.children.forEach(place);
    if (!node.children.length) row += 1;
    node.rows = row - node.row;
  };
  if (by) roots.sort(by);
  roots.forEach(place);
  return {nodes, rows: row};
}

function drawTree(view) {
  const {nodes, rows} = layOut(view.tree.branches);
  const hidden = view.tree.num_hidden;
  $("shown").textContent = `${count(nodes.length)} branches` + (hidden ? `, ${count(hidden)} older ones left out` : "");
  const width = Math.max(330, $("scroll").clientWidth - 2), end = Math.max(1, ...nodes.map(n => n.end));
  const f = $("scale").value === "root" ? Math.sqrt : x => x;
  const right = nodes.some(n => n.holders.length) ? 118 : 12;
  const x = tokens => 2 + f(tokens) / f(end) * (width - right);
  const height = TOP + Math.max(rows, 1) * ROW + 6;
  const svg = shape("svg", {width, height, role: "group", "aria-label": `${nodes.length} branches of cached prefixes`});
  drawAxis(svg, x, end, height);
  const most = Math.max(0, ...nodes.map(n => n.heat));
  for (const node of nodes) drawBranch(svg, node, x, most);
  for (const node of nodes) drawHolders(svg, node, x);
  if (!nodes.length) shape("text", {x: 4, y: TOP + 16, class: "axis"}, svg).textContent = "Nothing is cached yet.";
  const focused = document.activeElement && document.activeElement.getAttribute("data-key");
  $("scroll").replaceChildren(svg);
  if (focused) for (const g of svg.querySelectorAll(".branch")) if (g.dataset.key === focused) g.focus({preventScroll: true});
}

function drawAxis(svg, x, end, height) {
  const step = Math.max(1, 2 ** Math.floor(Math.log2(end / 6)));
  for (let at = 0, left = -99; at <= end; at += step) {
    if (x(at) - left < 70) continue;
    left = x(at);
    shape("line", {x1: x(at), x2: x(at), y1: TOP - 5, y2: height, class: "grid"}, svg);
    const text = at ? count(at) : "token 0";
    if (x(at) + 3 + 6 * text.length < svg.getAttribute("width")) shape("text", {x: x(at) + 3, y: 12, class: "axis"}, svg).textContent = text;
  }
}

function drawBranch(svg, node, x, most) {
  const said = `tokens ${count(node.begin)} to ${count(node.end)}, ${count(node.hits)} hits, idle ${ago(node.idle_s)}`;
  const g = shape("g", {class: "branch" + (node.key === chosen ? " chosen" : ""), "data-key": node.key, tabindex: "0",
    role: "button", "aria-label": said}, svg);
  const left = x(node.begin), w = Math.max(3, x(node.end) - left), y = TOP + node.row * ROW;
  const height = node.rows * ROW - GAP;
  shape("rect", {x: left, y, width: w, height, rx: 4, class: "box"}, g).style.fill = heatColor(node.heat, most);
  const total = Object.values(node.tiers).reduce((a, b) => a + b, 0);
  let from = left + 1;
  for (const tier of TIERS) if (node.tiers[tier]) {
    const part = (w - 2) * node.tiers[tier] / total;
    shape("rect", {x: from, y: y + height - 5, width: Math.max(0.5, part), height: 4, class: `t-${tier}`}, g);
    from += part;
  }
  for (const tick of node.ticks) drawTick(g, tick, x(tick.at), y);
  const texts = [`${short(node.end - node.begin)} tokens · ${count(node.hits)} hits · idle ${ago(node.idle_s)}`,
    `${short(node.end - node.begin)} · idle ${ago(node.idle_s)}`, `${count(node.hits)} hits`, count(node.hits)];
  const text = texts.find(one => one.length * 5.6 + 10 < w);
  if (text) shape("text", {x: left + 6, y: y + 19}, g).textContent = text + (node.hidden ? ` · +${node.hidden}` : "");
  shape("title", {}, g).textContent = said;
  const choose = () => { chosen = node.key; draw(); };
  g.addEventListener("click", choose);
  g.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
}

function drawTick(g, tick, at, y) {
  shape("rect", {x: at - 2, y: y - 1, width: 3.4, height: 9, class: `mark t-${tick.tier}`}, g);
  if (tick.is_junction) shape("path", {d: `M${at} ${y - 3}l5.5 6.5l-5.5 6.5l-5.5 -6.5Z`, class: `mark t-${tick.tier}`}, g);
}

function drawHolders(svg, node, x) {
  const y = TOP + node.row * ROW + (node.rows * ROW - GAP) / 2;
  const inside = node.children.length > 0;
  node.holders.forEach((holder, i) => {
    const at = x(holder.at) + (inside ? -8 - 11 * i : 8 + 11 * i);
    const mark = holder.is_kept ? shape("rect", {x: at - 4, y: y - 4, width: 8, height: 8, class: "kept"}, svg)
      : shape("circle", {cx: at, cy: y, r: 4.5, class: "holder"}, svg);
    shape("title", {}, mark).textContent = holder.name;
  });
  if (!node.holders.length || inside) return;
  const name = node.holders.length > 1 ? `${node.holders.length} holders` : node.holders[0].name;
  const at = x(node.end) + 6 + 11 * node.holders.length;
  shape("text", {x: at + 2, y: y + 4, class: "axis"}, svg).textContent = name.length > 15 ? name.slice(0, 14) + "…" : name;
}

function drawDetail(view) {
  const node = view.tree.branches.find(branch => branch.key === chosen);
  if (!node) {
    const note = chosen ? "That branch is not cached any more." : "Choose a branch to see its blocks, checkpoints and holders.";
    $("detail").replaceChildren(el("span", {class: "soft"}, note));
    return;
  }
  const list = el("dl");
  const say = (name, value) => list.append(el("dt", {}, name), el("dd", {class: "num"}, value));
  const blocks = Object.values(node.tiers).reduce((a, b) => a + b, 0);
  say("branch", node.key);
  say("tokens", `${count(node.begin)} – ${count(node.end)}`);
  say("hits in it or behind", count(node.hits));
  say("heat", node.heat.toFixed(2));
  say("idle", ago(node.idle_s));
  say("memory of its rows", bytes(blocks * view.block_bytes));
  for (const tier of TIERS) if (node.tiers[tier]) say("blocks, " + NAMES[tier], count(node.tiers[tier]));
  if (node.hidden) say("older branches left out", count(node.hidden));
  const parts = [el("h3", {}, "Branch"), list];
  if (node.ticks.length) parts.push(el("h3", {}, "Checkpoints"), grid(["at", "tier", "hits", ""],
    node.ticks.map(t => [count(t.at), NAMES[t.tier], count(t.hits), t.is_junction ? "parting" : ""])));
  if (node.holders.length) parts.push(el("h3", {}, "Holders"), grid(["at", "who"],
    node.holders.map(h => [count(h.at), h.name + (h.is_kept ? " (kept)" : "")])));
  $("detail").replaceChildren(...parts);
}

// ---- requests ----------------------------------------------------------------------------------

function drawRequests(view) {
  const focused = document.activeElement && document.activeElement.getAttribute("data-request");
  $("rows").replaceChildren(...view.admissions.map(one => {
    const misses = Object.entries(one.misses).sort((a, b) => b[1] - a[1]);
    const restored = one.cached_tokens - (one.sources.pool || 0);
    const meter = el("div", {class: "meter", title: `${count(one.cached_tokens)} cached`},
      el("div", {class: "hit", style: {width: `${share(one.sources.pool || 0, one.prompt_tokens)}%`}}),
      el("div", {class: "restored", style: {width: `${share(restored, one.prompt_tokens)}%`}}));
    const who = one.session ? `${one.request_id}, session ${one.session}` : one.request_id;
    return el("tr", {}, el("td", {class: "mono name", title: who}, one.request_id),
      el("td", {class: "num"}, ago(view.now_s - one.at_s)), el("td", {class: "num"}, count(one.prompt_tokens)),
      el("td", {}, meter),
      el("td", {class: "soft aside"}, Object.entries(one.sources).map(([source, n]) => `${source} ${count(n)}`).join(", ")),
      el("td", {class: "soft aside"}, misses.map(([reason, n]) => `${reason.replaceAll("_", " ")} ${count(n)}`).join(", ") || "nothing"),
      el("td", {}, el("button", {type: "button", class: "quiet", "data-request": one.request_id, onclick: () => explainRequest(one.request_id)}, "Explain")));
  }));
  if (focused) for (const button of $("rows").querySelectorAll("button")) if (button.dataset.request === focused) button.focus({preventScroll: true});
}

/** Say why a request hit what it hit, and then, where a record is kept, what would have helped. */
export async function explainRequest(id) {
  const out = $("why"), own = asked = {};
  out.hidden = false;
  out.replaceChildren(el("p", {class: "soft"}, `${id} …`));
  for (const remedies of records ? [false, true] : [false]) {
    const response = await fetch(`v1/cache/explain/${encodeURIComponent(id)}?remedies=${remedies}`, {headers: headers()});
    if (own !== asked) return;  // another request was asked about meanwhile
    if (!response.ok) { out.replaceChildren(el("p", {class: "bad"}, await complaint(response))); return; }
    drawExplanation(out, await response.json(), remedies);
    out.scrollIntoView({block: "nearest"});
  }
}

function drawExplanation(out, told, hasRemedies) {
  const misses = {}, spans = told.spans;
  for (const span of spans) misses[span.reason] = (misses[span.reason] || 0) + span.end - span.begin;
  const parts = partsOf(told.cached_tokens, told.sources, misses, 0);
  const summary = [el("b", {}, count(told.cached_tokens)), ` of ${count(told.prompt_tokens)} tokens hit; rows that keep every token matched ${count(told.dense_match_tokens)}`];
  const rows = spans.map(span => {
    const left = span.lost ? `It left ${span.lost.seconds_before} s before (${span.lost.cause}); ${count(span.lost.requests_admitted_since)} requests came since. ` : "";
    const help = span.remedy ? `${span.remedy.text}; then ${count(span.remedy.cached_tokens)} hit` : hasRemedies ? "nothing that a replay confirms" : "replaying …";
    return [`${count(span.begin)} – ${count(span.end)}`, left + inWords(span.reason), ...(records ? [help] : [])];
  });
  out.replaceChildren(el("h3", {class: "mono"}, told.request_id), ...drawPrompt(parts, summary),
    rows.length ? grid(["tokens", "why they were computed", ...(records ? ["what would have helped"] : [])], rows) : "",
    records ? "" : el("p", {class: "soft foot"}, "With --cache-trace FILE the server also finds what would have helped."));
}

// ---- the stream --------------------------------------------------------------------------------

function draw() {
  if (!last || getComputedStyle($("cache")).display === "none") return;
  for (const part of [drawFacts, drawHistory, drawPool, drawShares, drawBehind, drawTree, drawDetail, drawRequests]) part(last);
  $("cost").textContent = `looked up in ${last.took_ms.toFixed(1)} ms`;
}

function tell(text, kind) { $("state").textContent = text; $("state").className = kind; }

function take(body) {
  if (body.error) { tell(body.error.message, "lost"); return; }
  if (paused) return;
  last = body;
  tell("live", "live");
  draw();
}

/** Follow the cache, if this visitor may see it; asked again, with the key that there is now. */
export async function followCache(settings) {
  records = settings.records;
  if (following) following.abort();
  const own = following = new AbortController();
  const mayAsk = settings.cache === "open" || (settings.cache === "operator" && key());
  $("cache-off").hidden = settings.cache !== "off";
  $("cache-gate").hidden = settings.cache !== "operator" || Boolean(mayAsk);
  if (!mayAsk) { tell("ready", "live"); return; }
  while (!own.signal.aborted) {
    try {
      const response = await fetch("cache/events", {headers: headers(), cache: "no-store", signal: own.signal});
      if (response.status === 401 || response.status === 403) {
        $("view").hidden = true;
        $("cache-gate").hidden = false;
        tell("ready", "live");
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      $("view").hidden = false;
      for await (const body of events(response)) take(body);
      tell("the stream ended: trying again", "lost");
    } catch (error) {
      if (error.name === "AbortError") return;
      tell("no answer: trying again", "lost");
    }
    await new Promise(resolve => setTimeout(resolve, 2000));
  }
}

for (let i = 0; i <= 5; i++) $("ramp").append(el("i", {class: "chip", style: {background: heatColor(i, 5)}}));
for (const id of ["order", "scale"]) $(id).addEventListener("change", draw);
addEventListener("resize", draw);
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  tell(paused ? "paused" : "live", paused ? "" : "live");
});
