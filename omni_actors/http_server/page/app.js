"use strict";
// The page of the HTTP server: a conversation through /v1/chat/completions, or a spoken one through /v1/realtime; the
// pipeline through /v1/status.
// `player.js` and `recorder.js` are the page's mouth and ear; whatever else speaks or listens uses them, too.

import * as chat from "./chat.js";
import { $ } from "./common.js";
import * as composer from "./composer.js";
import * as conversations from "./conversations.js";
import * as level from "./level.js";
import * as messages from "./messages.js";
import { player } from "./player.js";
import * as settings from "./settings.js";
import * as status from "./status.js";
import * as voice from "./voice.js";
import * as welcome from "./welcome.js";

const WIDE = matchMedia("(min-width: 56.01rem)");  // else a panel covers the conversation
const PANELS = ["conversations-panel", "settings-panel", "details-panel"];

/** Shows one panel, or none for "". */
function showPanel(shown) {
  for (const id of PANELS) {
    $(id).hidden = id !== shown;
    $(`toggle-${id}`).ariaExpanded = String(id === shown);
  }
}

/** Closes the panel that covers the conversation. Says whether there was one. */
function uncover() {
  const covered = !WIDE.matches && PANELS.some((id) => !$(id).hidden);
  if (covered) showPanel("");
  return covered;
}

function setUpPanels() {
  for (const id of PANELS) {
    $(`toggle-${id}`).onclick = () => {
      const shown = $(id).hidden ? id : "";
      showPanel(shown);
      if (WIDE.matches) localStorage.setItem("panel", shown);  // a wide window remembers it
    };
  }
  showPanel(WIDE.matches ? localStorage.getItem("panel") ?? "" : "");
  WIDE.addEventListener("change", uncover);
}

function onEscape() {
  if (!uncover() && !voice.leave() && !composer.leave()) chat.stop();
}

setUpPanels();
settings.setUp({ onKey: () => { chat.showError(null); status.refresh(); }, show: () => showPanel("settings-panel") });
messages.setUp();
composer.setUp();
welcome.setUp(composer.ask);
level.setUp();
voice.setUp();
conversations.setUp(async () => { await chat.clear(); composer.reset(); }, composer.edit);
player.addEventListener("change", chat.showRunning);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").onclick = async () => { await chat.stop(); $("text").focus(); };
$("clear").onclick = async () => { await chat.clear(); conversations.begin(); composer.reset(); voice.startOver(); };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") onEscape();
  if (!event.altKey || settings.draws()) return;
  if (event.code === "KeyM") { event.preventDefault(); (voice.runs() ? voice.toggleMute : composer.toggleRecording)(); }
  if (event.code === "KeyC") { event.preventDefault(); voice.toggle(); }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) status.refresh(); });
status.refresh();
