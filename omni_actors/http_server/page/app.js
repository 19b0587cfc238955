"use strict";
// The page of the HTTP server: a conversation through /v1/chat/completions, the pipeline through /v1/status.
// `player.js` and `recorder.js` are the page's mouth and ear; whatever else speaks or listens uses them, too.

import * as chat from "./chat.js";
import { $ } from "./common.js";
import * as composer from "./composer.js";
import * as level from "./level.js";
import * as messages from "./messages.js";
import { player } from "./player.js";
import * as settings from "./settings.js";
import * as status from "./status.js";

const WIDE = matchMedia("(min-width: 56.01rem)");  // else a panel covers the conversation
const PANELS = ["settings-panel", "details-panel"];

/** Closes the panels that cover the conversation. Says whether there were any. */
function uncover() {
  const open = WIDE.matches ? [] : PANELS.filter((id) => !$(id).hidden);
  open.forEach((id) => { $(id).hidden = true; });
  return open.length > 0;
}

/** A button that shows and hides a panel; wide windows remember it. */
function setUpPanel(id, openAtFirst) {
  const button = $(`toggle-${id}`);
  const kept = localStorage.getItem(id);
  $(id).hidden = !WIDE.matches || !(kept === null ? openAtFirst : kept === "open");
  button.ariaExpanded = String(!$(id).hidden);
  button.onclick = () => {
    const open = $(id).hidden;
    uncover();
    $(id).hidden = !open;
    if (WIDE.matches) localStorage.setItem(id, open ? "open" : "closed");
  };
  new MutationObserver(() => { button.ariaExpanded = String(!$(id).hidden); }).observe($(id), { attributeFilter: ["hidden"] });
}

function onEscape() {
  if (!uncover() && !composer.leave()) chat.stop();
}

setUpPanel("settings-panel", true);
setUpPanel("details-panel", false);
WIDE.addEventListener("change", uncover);
settings.setUp(status.refresh);
messages.setUp();
composer.setUp();
level.setUp();
player.addEventListener("change", chat.showRunning);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").onclick = async () => { await chat.stop(); $("text").focus(); };
$("clear").onclick = async () => { await chat.clear(); composer.reset(); };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") onEscape();
  if (event.altKey && event.code === "KeyM") { event.preventDefault(); composer.toggleRecording(); }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) status.refresh(); });
status.refresh();
