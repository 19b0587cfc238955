"use strict";
// A session of /v1/realtime over WebRTC or a WebSocket, which is opened again when it is lost.

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
 * will be opened again, `failed(error)` when none will, `sound(stream)` for the answers of a call.
 *
 * With the `stream` of the microphone it is a call (WebRTC), or a WebSocket if there is no way for a call's packets.
 */
export class Session {
  #on;
  #stream;
  #line = null;  // the WebSocket, or the channel of events of the call
  #peer = null;  // of the call
  #attempt = 0;
  #timer = 0;
  #closed = false;

  constructor(callbacks, stream = null) {
    this.#on = callbacks;
    this.#stream = stream;
    this.#open();
  }

  /** Whether it is a call: the server hears the microphone itself, and plays the answers. */
  get calls() { return this.#peer !== null; }

  get open() { return this.#line?.readyState === (this.calls ? "open" : WebSocket.OPEN); }

  /** Sends an event; says whether it was sent. */
  send(type, fields = {}) {
    if (!this.open) return false;
    this.#line.send(JSON.stringify({ type, ...fields }));
    return true;
  }

  /** Sends sound of the user (bytes of PCM). Says whether the connection keeps up. */
  sound(pcm) {
    if (this.calls) return true;
    if (this.open && this.#line.bufferedAmount > BEHIND) return false;
    this.send("input_audio_buffer.append", { audio: btoa(String.fromCharCode(...new Uint8Array(pcm))) });
    return true;
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#hangUp();
  }

  #hangUp() {
    const line = this.#line, peer = this.#peer;
    this.#line = this.#peer = null;
    line?.close();
    peer?.close();
  }

  #open() {
    let began = 0;
    const ended = async () => {
      clearTimeout(patience);
      if (this.#closed || this.#line !== line) return;
      const called = this.calls;
      this.#hangUp();
      this.#on.lost();
      if (called && !began) {
        this.#stream = null;
        this.#open();
        return;
      }
      if (began && performance.now() - began > SETTLED) this.#attempt = 0;
      const reason = began ? new PageError("The connection ends again and again.") : await refusal();
      if (this.#closed) return;
      if (this.#attempt === WAITS.length || FINAL.includes(reason.status)) this.#fail(reason);
      else this.#timer = setTimeout(() => this.#open(), WAITS[this.#attempt++]);
    };
    const patience = setTimeout(ended, OPENING);
    let line;
    try {
      line = this.#line = this.#stream ? this.#call(ended) : this.#webSocket();
    } catch (error) {
      clearTimeout(patience);
      this.#fail(new PageError("The API key has characters that cannot be sent from a page.", error.message));
      return;
    }
    line.onmessage = ({ data }) => {
      if (this.#line !== line) return;
      const event = JSON.parse(data);
      if (event.type !== "session.created") { this.#on.event(event); return; }
      clearTimeout(patience);
      began = performance.now();
      this.#on.created(event.session);
    };
    line.onclose = ended;
  }

  #webSocket() {
    const key = $("key").value.trim(), url = new URL("/v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    return new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
  }

  #call(ended) {
    const peer = this.#peer = new RTCPeerConnection();
    this.#stream.getAudioTracks().forEach((track) => peer.addTrack(track, this.#stream));
    peer.ontrack = ({ track }) => this.#on.sound(new MediaStream([track]));
    peer.onconnectionstatechange = () => { if (["failed", "closed"].includes(peer.connectionState)) ended(); };
    const channel = peer.createDataChannel("oai-events");
    const connect = async () => {
      await peer.setLocalDescription();
      const headers = { "Content-Type": "application/sdp" };
      const answer = await request("/v1/realtime/calls", { method: "POST", headers, body: peer.localDescription.sdp });
      await peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    };
    connect().catch(ended);
    return channel;
  }

  #fail(error) {
    this.close();
    this.#on.failed(error);
  }
}
