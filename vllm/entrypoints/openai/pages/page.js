// The page: which view is shown, the key, and who may see what.

import {followCache, explainRequest} from "./cache.js";
import {loadModels, openChat} from "./chat.js";
import {$, keepKey, key} from "./dom.js";

function look(view) {
  document.body.className = view;
  $("to-chat").setAttribute("aria-pressed", String(view === "chat"));
  $("to-cache").setAttribute("aria-pressed", String(view === "cache"));
  dispatchEvent(new Event("resize"));
}

function askForKey(note) {
  $("gate").hidden = false;
  $("all").hidden = true;
  if (note) $("gate-note").textContent = note;
  $("key").focus();
}

async function enter(settings) {
  const status = await loadModels();
  // The operator's key opens both; a client's opens the chat.
  if (status === 401 || status === 403) return askForKey("That key is not valid here.");
  $("gate").hidden = true;
  $("all").hidden = false;
  $("change-key").hidden = !settings.needs_key && settings.cache !== "operator";
  look(document.body.className);
  followCache(settings);
}

async function settingsOf() {
  const response = await fetch("ui/settings", {cache: "no-store"});
  return response.json();
}

async function main() {
  look(location.pathname.endsWith("/cache") ? "cache" : "chat");
  const settings = await settingsOf();
  $("to-chat").addEventListener("click", () => look("chat"));
  $("to-cache").addEventListener("click", () => look("cache"));
  $("change-key").addEventListener("click", () => askForKey());
  document.querySelector("#gate form").addEventListener("submit", event => {
    event.preventDefault();
    keepKey($("key").value);
    enter(settings);
  });
  openChat(settings, id => {
    if (getComputedStyle($("cache")).display === "none") look("cache");
    explainRequest(id);
  });
  if (settings.needs_key && !key()) askForKey(); else await enter(settings);
}

main();
