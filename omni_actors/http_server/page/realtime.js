"use strict";
// A session of /v1/realtime: its WebSocket, which is opened again when it is lost.

import { PageError, request } from "./api.js";
import { $ } from "./common.js";

const WAITS = [200, 1000, 2000, 4000, 8000];  // milliseconds before each attempt to connect again
const SETTLED = 5000;    // milliseconds after which a connection counts as good, and the waits begin again
const OPENING = 10_000;  // milliseconds in which a session must begin
const BEHIND = 400_000;  // bytes that may wait to be sent: some six seconds of sound
const FINAL = [401, 403, 404];  // refusals that waiting does not mend

/** The words for a refusal, whose reason a browser does not tell: the same address is asked without a WebSocket. */
async function refusal() {
  try {
    await request("/v1/realtime");
  } catch (error) {
    if (error.status === 426) return new PageError("The server cannot take another conversation at the moment. Try again shortly.");
    return error;
  }
  return new PageError("The server does not know spoken conversations.");
}

/**
 * Callbacks: `created(session)` for each new session, `event(event)` for all others, `lost()` when a connection ends that
 * will be opened again, `failed(error)` when none will.
 */
export class Session {
  #on;
  #socket = null;
  #attempt = 0;
  #timer = 0;
  #closed = false;

  constructor(callbacks) {
    this.#on = callbacks;
    this.#open();
  }

  get open() { return this.#socket?.readyState === WebSocket.OPEN; }

  /** Sends an event; says whether it was sent. */
  send(type, fields = {}) {
    if (!this.open) return false;
    this.#socket.send(JSON.stringify({ type, ...fields }));
    return true;
  }

  /** Sends sound of the user (bytes of PCM). Says whether the connection keeps up. */
  sound(pcm) {
    if (this.open && this.#socket.bufferedAmount > BEHIND) return false;
    this.send("input_audio_buffer.append", { audio: btoa(String.fromCharCode(...new Uint8Array(pcm))) });
    return true;
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  #open() {
    const key = $("key").value.trim(), url = new URL("/v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    let socket;
    try {
      socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    } catch (error) {
      this.#fail(new PageError("The API key has characters that cannot be sent from a page.", error.message));
      return;
    }
    this.#socket = socket;
    let began = 0;
    const patience = setTimeout(() => socket.close(), OPENING);
    socket.onmessage = ({ data }) => {
      if (this.#closed) return;
      const event = JSON.parse(data);
      if (event.type !== "session.created") { this.#on.event(event); return; }
      clearTimeout(patience);
      began = performance.now();
      this.#on.created(event.session);
    };
    socket.onclose = async () => {
      clearTimeout(patience);
      if (this.#closed) return;
      this.#on.lost();
      if (began && performance.now() - began > SETTLED) this.#attempt = 0;
      const reason = began ? new PageError("The connection ends again and again.") : await refusal();
      if (this.#closed) return;
      if (this.#attempt === WAITS.length || FINAL.includes(reason.status)) this.#fail(reason);
      else this.#timer = setTimeout(() => this.#open(), WAITS[this.#attempt++]);
    };
  }

  #fail(error) {
    this.close();
    this.#on.failed(error);
  }
}
