"use strict";
// What the modules of the page share: its elements, its state, and requests to the server.

export const $ = (id) => document.getElementById(id);

export const state = {
  status: null,       // last response of /v1/status
  history: [],        // messages of the conversation, in OpenAI's format
  attachments: [],    // {name, part}, to be sent with the next message
  request: null,      // AbortController of the running request
  requestId: null,    // its id in the pipeline
  recorder: null,     // MediaRecorder while recording
  lastTick: 0,        // timer of the next look at the status
};

export function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The message of a response that is not a success. */
export async function failure(response) {
  try {
    const { error } = await response.json();
    return `${error.message}${error.code ? ` (${error.code})` : ""}`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}
