// The chat: conversations kept in the browser, answers streamed over the Messages API. Each answer
// shows where its prompt came from, and why the rest was computed.

import {$, complaint, count, drawPrompt, el, events, headers, partsOf, percent, share} from "./dom.js";

const STORE = "vllm.chats";
const CHANGES = {
  model_changed: "another model than the turn before", system_changed: "the system text differs from the turn before",
  tools_changed: "the tools differ from the turn before", messages_changed: "an earlier message differs from the turn before",
  unavailable: "thinking, effort or the answer’s form differs from the turn before",
  previous_message_not_found: "the server no longer knows the turn before",
};

let chats = [], chat = null, editing = null, running = null;
let server = {reasons: false, cache: "off"};
// Pictures of the message that is being written, as the Messages API has them.
let pictures = [], sees = false;
let explain = () => {};

// ---- what is kept in the browser ---------------------------------------------------------------

function load() {
  try { chats = JSON.parse(localStorage.getItem(STORE)) || []; } catch { chats = []; }
  if (!Array.isArray(chats)) chats = [];
}

function save() {
  // A browser keeps some megabytes: the conversations used longest ago give way.
  for (let num = chats.length; num > 0; num--) {
    try { localStorage.setItem(STORE, JSON.stringify(chats.slice(0, num))); return; }
    catch (error) { if (error.name !== "QuotaExceededError") throw error; }
  }
}

function begin() {
  const old = chat ? chat.settings : {};
  chat = {id: crypto.randomUUID ? crypto.randomUUID() : String(Date.now()), turns: [],
    settings: {maxTokens: "", temperature: "", thinking: false, private: false, system: "", tools: "", model: "", ...old}};
  show();
}

function choose(other) {
  if (running) running.abort();
  chat = other;
  stopEditing();
  show();
}

function remove(other) {
  chats = chats.filter(one => one !== other);
  // What only this conversation used may go first now; that it fails changes nothing here.
  fetch(`v1/cache/sessions/${encodeURIComponent(other.id)}/end`, {method: "POST", headers: headers()}).catch(() => {});
  save();
  if (other === chat) { if (chats.length) choose(chats[0]); else begin(); } else drawList();
}

function drawList() {
  $("list").replaceChildren(...chats.map(one => {
    const title = titleOf(one);
    return el("li", {class: one === chat ? "now" : ""},
      el("button", {type: "button", class: "title", title, "aria-current": one === chat ? "true" : undefined, onclick: () => choose(one)}, title),
      el("button", {type: "button", class: "quiet", "aria-label": `Delete ${title}`, title: "Delete", onclick: () => remove(one)}, "×"));
  }));
}

function titleOf(one) {
  const first = one.turns.find(turn => turn.role === "user");
  const text = first ? first.content.filter(block => block.type === "text").map(block => block.text).join(" ") : "";
  return text.slice(0, 80) || (first ? "A picture" : "New chat");
}

// ---- settings ----------------------------------------------------------------------------------

const FIELDS = {"max-tokens": "maxTokens", temperature: "temperature", thinking: "thinking", private: "private",
  system: "system", tools: "tools", model: "model"};

function showSettings() {
  for (const [id, name] of Object.entries(FIELDS)) {
    const field = $(id), value = chat.settings[name];
    if (field.type === "checkbox") field.checked = Boolean(value);
    else if (name !== "model" || value) field.value = value;
  }
  if (!$("model").value && $("model").options.length) $("model").selectedIndex = 0;
  noteSettings();
}

function noteSettings() {
  for (const [id, name] of Object.entries(FIELDS)) {
    const field = $(id);
    chat.settings[name] = field.type === "checkbox" ? field.checked : field.value;
  }
  const s = chat.settings, notes = [s.model];
  if (s.system) notes.push("system text");
  const tools = readTools();
  if (tools.length) notes.push(tools.length === 1 ? "1 tool" : `${tools.length} tools`);
  if (s.thinking) notes.push("thinks first");
  if (s.private) notes.push("leaves nothing");
  $("settings-note").textContent = notes.filter(Boolean).join(" · ");
  if (chats.includes(chat)) save();
}

/** The tools, of which those in the form of chats are taken too. */
function readTools() {
  const text = chat.settings.tools.trim(), note = $("tools-note");
  note.hidden = true;
  if (!text) return [];
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) throw new Error("not a list");
    return tools.map(tool => tool.function
      ? {name: tool.function.name, description: tool.function.description, input_schema: tool.function.parameters || {type: "object"}} : tool);
  } catch (error) {
    note.textContent = `These tools are left out: ${error.message}.`;
    note.hidden = false;
    return [];
  }
}

export async function loadModels() {
  const response = await fetch("v1/models", {headers: headers()});
  if (!response.ok) return response.status;
  const models = (await response.json()).data;
  $("model").replaceChildren(...models.map(model => el("option", {value: model.id}, model.id)));
  const most = models.length ? models[0].max_model_len : 4096;
  sees = models.length > 0 && models[0].capabilities.includes("images");
  $("add").hidden = !sees;
  $("max-tokens").placeholder = String(Math.max(16, Math.min(1024, most >> 2)));
  showSettings();
  return 200;
}

// ---- drawing -----------------------------------------------------------------------------------

function show() {
  drawList();
  showSettings();
  drawTurns();
}

function drawTurns() {
  $("turns").replaceChildren(...chat.turns.map(drawTurn));
  if (!chat.turns.length) $("turns").append(el("p", {class: "empty"},
    "Each answer has a bar over it: where its prompt came from. Ask something, then ask again, and see what the second turn needed not compute."));
  scrollDown();
}

const scrollDown = () => { $("turns").scrollTop = $("turns").scrollHeight; };
const names = turns => Object.fromEntries(turns.flatMap(turn => turn.content).filter(b => b.type === "tool_use").map(b => [b.id, b.name]));

function drawTurn(turn, index) {
  const made = el("article", {class: `turn ${turn.role}`, "aria-label": turn.role === "user" ? "You" : "Answer"});
  if (turn.role === "user") fillUser(made, turn, index); else fillAnswer(made, turn, index);
  return made;
}

function fillUser(made, turn, index) {
  const known = names(chat.turns.slice(0, index));
  for (const block of turn.content)
    made.append(block.type === "image" ? drawPicture(block) : block.type === "tool_result"
      ? el("div", {class: "call"}, el("span", {class: "name"}, `Result of ${known[block.tool_use_id] || "a call"}`), el("pre", {}, block.content))
      : drawText(block.text, true));
  if (turn.content.every(block => block.type === "text"))
    made.append(el("div", {class: "foot"}, el("button", {type: "button", class: "quiet", onclick: () => edit(index)}, "Edit")));
}

function fillAnswer(made, turn, index) {
  if (turn.usage) made.append(...drawBar(turn));
  const isLast = index === chat.turns.length - 1, waits = turn.state === "running";
  for (const block of turn.content) {
    if (block.type === "thinking") made.append(el("details", {class: "thought", open: waits && turn.content.length === 1},
      el("summary", {}, waits && turn.content.length === 1 ? "Thinking" : "Thought"), el("div", {class: "text"}, block.thinking)));
    else if (block.type === "text") made.append(drawText(block.text));
    else if (block.type === "tool_use") made.append(drawCall(block, isLast && !waits));
  }
  if (waits && !turn.content.length) made.append(el("p", {class: "soft"}, turn.usage ? "…" : "Waiting for the first token …"));
  if (turn.error) made.append(el("p", {class: "bad", role: "alert"}, turn.error));
  if (!waits) made.append(drawFoot(turn, index));
}

function drawBar(turn) {
  const u = turn.usage, cached = u.cache_read_input_tokens;
  const total = u.input_tokens + cached + u.cache_creation_input_tokens;
  const missed = u.miss_tokens ? Object.values(u.miss_tokens).reduce((a, b) => a + b, 0) : 0;
  const told = turn.diagnostics, reason = told && told.cache_miss_reason, first = told && told.first_difference;
  const parts = partsOf(cached, u.external_sources, u.miss_tokens || {}, total - cached - missed);
  const summary = [el("b", {}, count(cached)), ` of ${count(total)} tokens from the cache (${percent(cached, total)})`];
  if (reason) summary.push(`; ${CHANGES[reason.type] || reason.type}`);
  if (first) summary.push(`, from token ${count(first.token_offset)} on`);
  const drawn = drawPrompt(parts, summary, first ? first.token_offset : undefined);
  if (u.encoder_seconds) drawn.splice(1, 0, drawTower(1000 * u.encoder_seconds, turn.firstMs));
  return drawn;
}

/** How much of the wait for the first token a tower ran for the turn's pictures. */
function drawTower(towerMs, firstMs) {
  const part = firstMs ? Math.min(100, share(towerMs, firstMs)) : 100;
  const said = firstMs ? `, ${part.toFixed(0)}% of the wait for the first token` : "";
  const label = `Pictures were read for ${(towerMs / 1000).toFixed(2)} s${said}`;
  return el("div", {class: "wait num", title: label}, el("span", {class: "lane", role: "img", "aria-label": label},
    el("i", {style: {width: `${part}%`}})), el("span", {}, `pictures ${(towerMs / 1000).toFixed(2)} s`));
}

/** A text, with fenced code set apart; nothing else of Markdown is read. */
function drawText(text, clips) {
  const made = el("div", {class: clips ? "text clip" : "text"});
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (i % 2) made.append(el("pre", {}, part.replace(/\n$/, "")));
    else if (part) made.append(part);
  });
  if (clips && text.length > 800) made.tabIndex = 0;
  return made;
}

function drawCall(block, wantsResult) {
  const made = el("div", {class: "call"}, el("span", {class: "name"}, `Calls ${block.name}`),
    el("pre", {}, block.partial === undefined ? JSON.stringify(block.input, null, 2) : block.partial));
  if (wantsResult) made.append(el("label", {class: "soft foot"}, "Its result ",
    el("textarea", {rows: "2", "data-call": block.id, placeholder: "What the tool answers. Send passes it on."})));
  return made;
}

function drawFoot(turn, index) {
  const foot = el("div", {class: "foot num"}), u = turn.usage;
  const notes = u ? [`${count(u.output_tokens)} tokens`] : [];
  if (turn.firstMs) notes.push(`the first after ${(turn.firstMs / 1000).toFixed(2)} s, all after ${(turn.ms / 1000).toFixed(2)} s`);
  if (turn.stop === "max_tokens") notes.push("cut off at its limit");
  if (turn.state === "stopped") notes.push("stopped");
  foot.append(notes.join(" · "));
  const texts = turn.content.filter(block => block.type === "text").map(block => block.text).join("\n");
  if (texts && navigator.clipboard) foot.append(el("button", {type: "button", class: "quiet", onclick: () => navigator.clipboard.writeText(texts)}, "Copy"));
  if (index === chat.turns.length - 1) foot.append(el("button", {type: "button", class: "quiet", onclick: again}, "Again"));
  if (turn.id && server.cache !== "off") foot.append(el("button", {type: "button", class: "quiet", onclick: () => explain(turn.id)}, "Explain"));
  return foot;
}

// ---- asking ------------------------------------------------------------------------------------

function edit(index) {
  editing = index;
  $("editing").hidden = false;
  $("ask").value = chat.turns[index].content.map(block => block.text).join("\n");
  $("ask").focus();
}

/** Take pictures into the message; what is none is left to the browser. */
function addPictures(files) {
  const found = sees ? [...files].filter(file => file.type.startsWith("image/")) : [];
  for (const file of found) {
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      const [head, data] = reader.result.split(",", 2);
      pictures.push({type: "image", source: {type: "base64", media_type: head.slice(5).split(";", 1)[0], data}});
      drawPictures();
    });
    reader.readAsDataURL(file);
  }
  return found.length > 0;
}

function drawPictures() {
  $("pictures").hidden = !pictures.length;
  $("pictures").replaceChildren(...pictures.map(picture => el("span", {class: "picture"}, drawPicture(picture),
    el("button", {type: "button", class: "quiet", title: "Leave it out", "aria-label": "Leave the picture out",
      onclick: () => { pictures = pictures.filter(one => one !== picture); drawPictures(); }}, "×"))));
}

const drawPicture = block => el("img", {alt: "A picture", src: `data:${block.source.media_type};base64,${block.source.data}`});

function stopEditing() {
  if (editing !== null) $("ask").value = "";
  editing = null;
  $("editing").hidden = true;
}

function again() {
  if (running) return;
  chat.turns.pop();
  answer();
}

function send() {
  if (running) return;
  const text = $("ask").value.trim(), content = [];
  for (const field of document.querySelectorAll("[data-call]"))
    content.push({type: "tool_result", tool_use_id: field.dataset.call, content: field.value});
  content.push(...pictures);
  if (text) content.push({type: "text", text});
  if (!content.length) return;
  pictures = [];
  drawPictures();
  if (editing !== null) chat.turns.length = editing;
  $("ask").value = "";
  stopEditing();
  chat.turns.push({role: "user", content});
  answer();
}

/** What the server is asked: all turns that have something to say. */
function body() {
  const s = chat.settings, tools = readTools();
  const messages = chat.turns.filter(turn => turn.content.length && !turn.error)
    .map(turn => ({role: turn.role, content: turn.content}));
  const before = chat.turns.findLast(turn => turn.role === "assistant" && turn.id);
  return {
    model: s.model, messages, stream: true, max_tokens: Number(s.maxTokens || $("max-tokens").placeholder),
    diagnostics: {previous_message_id: before ? before.id : null},
    ...(s.system ? {system: s.system} : {}), ...(tools.length ? {tools} : {}),
    ...(s.thinking ? {thinking: {type: "adaptive"}} : {}),
    ...(s.temperature !== "" ? {temperature: Number(s.temperature)} : {}),
    ...(s.private ? {skip_cache_insert: true} : {}),
  };
}

async function answer() {
  const own = chat, asked = body(), turn = {role: "assistant", content: [], state: "running"};
  own.turns.push(turn);
  chats = [own, ...chats.filter(one => one !== own)];
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  show();
  const began = performance.now();
  let due = 0;
  // Drawn at most once a frame, and only where it is looked at.
  const redraw = () => {
    if (due || own !== chat) return;
    due = requestAnimationFrame(() => {
      due = 0;
      const made = $("turns").lastElementChild, atEnd = $("turns").scrollHeight - $("turns").scrollTop - $("turns").clientHeight < 60;
      if (made && own === chat) made.replaceWith(drawTurn(turn, own.turns.length - 1));
      if (atEnd) scrollDown();
    });
  };
  try {
    const response = await fetch("v1/messages", {method: "POST", signal: running.signal,
      headers: headers({"Content-Type": "application/json", "X-Session-Id": own.id}), body: JSON.stringify(asked)});
    if (!response.ok) throw new Error(await complaint(response));
    for await (const event of events(response)) {
      take(turn, event);
      if (turn.content.length && !turn.firstMs) turn.firstMs = performance.now() - began;
      redraw();
    }
    turn.state = "done";
  } catch (error) {
    turn.state = "stopped";
    if (error.name !== "AbortError") turn.error = error.message;
  }
  cancelAnimationFrame(due);
  turn.ms = performance.now() - began;
  // A call that was cut off cannot be sent back.
  turn.content = turn.content.filter(block => block.partial === undefined && (block.type !== "text" || block.text));
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  save();
  if (own === chat) drawTurns();
}

function take(turn, event) {
  const block = turn.content[event.index];
  switch (event.type) {
    case "message_start":
      turn.id = event.message.id;
      turn.usage = event.message.usage;
      turn.diagnostics = event.message.diagnostics;
      break;
    case "content_block_start":
      turn.content[event.index] = event.content_block;
      if (event.content_block.type === "tool_use") event.content_block.partial = "";
      break;
    case "content_block_delta":
      if (event.delta.type === "text_delta") block.text += event.delta.text;
      else if (event.delta.type === "thinking_delta") block.thinking += event.delta.thinking;
      else if (event.delta.type === "signature_delta") block.signature = event.delta.signature;
      else if (event.delta.type === "input_json_delta") block.partial += event.delta.partial_json;
      break;
    case "content_block_stop":
      if (block.type === "tool_use") { block.input = JSON.parse(block.partial || "{}"); delete block.partial; }
      break;
    case "message_delta":
      turn.usage = {...turn.usage, ...event.usage};
      turn.stop = event.delta.stop_reason;
      break;
    case "error":
      throw new Error(event.error.message);
  }
}

// ---- beginning ---------------------------------------------------------------------------------

export function openChat(settings, onExplain) {
  server = settings;
  explain = onExplain;
  $("reasons-off").hidden = settings.reasons;
  load();
  if (chats.length) { chat = chats[0]; show(); } else begin();
  $("new").addEventListener("click", () => { if (running) running.abort(); stopEditing(); begin(); $("ask").focus(); });
  $("keep").addEventListener("click", stopEditing);
  $("stop").addEventListener("click", () => running && running.abort());
  $("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("ask").addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "Escape") { if (running) running.abort(); else stopEditing(); }
  });
  for (const id of Object.keys(FIELDS)) $(id).addEventListener("input", noteSettings);
  $("add").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", event => { addPictures(event.target.files); event.target.value = ""; });
  $("ask").addEventListener("paste", event => { if (addPictures(event.clipboardData.files)) event.preventDefault(); });
  $("chat").addEventListener("dragover", event => { if (sees) event.preventDefault(); });
  $("chat").addEventListener("drop", event => { if (addPictures(event.dataTransfer.files)) event.preventDefault(); });
}
