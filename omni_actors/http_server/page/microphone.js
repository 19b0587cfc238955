"use strict";
// The open microphone of a spoken conversation.

import { PageError } from "./api.js";

const RATE = 24000;    // Hz of what is sent
const CUTOFF = 10500;  // Hz; higher sounds would be heard as lower ones at that rate

/** Asks for the microphone. Raises `PageError`. */
export async function openMicrophone(constraints = true) {
  if (!navigator.mediaDevices) throw new PageError("The browser gives a microphone to https pages and to localhost only.");
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: constraints });
  } catch (error) {
    throw new PageError("The microphone cannot be used. Allow it for this page in the browser's settings.", error.message);
  }
}

/** Calls `heard` with each piece of a stream's sound: {pcm, peak}. Raises `PageError` if the browser cannot listen all the time. */
export async function capture(context, stream, heard) {
  try {
    await context.audioWorklet.addModule("/capture.js");
  } catch (error) {
    throw new PageError("The browser cannot listen all the time. Record your messages instead.", error.message);
  }
  const source = context.createMediaStreamSource(stream), node = new AudioWorkletNode(context, "capture", {
    numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit",
  });
  if (context.sampleRate > RATE) {
    const filter = new BiquadFilterNode(context, { type: "lowpass", frequency: CUTOFF });
    source.connect(filter).connect(node);
  } else {
    source.connect(node);
  }
  node.port.onmessage = ({ data }) => heard(data);
  return source;
}

/** Gives what the user says in pieces; while it is muted, silence. */
export class Microphone {
  #context;

  constructor(stream, context) {
    this.stream = stream;
    this.#context = context;
  }

  /** Opens it. `heard` is called with each piece: {pcm, peak}, `lost` if it is unplugged or forbidden. Raises `PageError`. */
  static async open(heard, lost) {
    const stream = await openMicrophone({ echoCancellation: true, noiseSuppression: true, autoGainControl: true });
    const context = new AudioContext({ latencyHint: "interactive" });
    try {
      await capture(context, stream, heard);
    } catch (error) {
      stream.getTracks().forEach((track) => track.stop());
      context.close();
      throw error;
    }
    stream.getTracks().forEach((track) => { track.onended = lost; });
    context.resume();
    return new Microphone(stream, context);
  }

  set muted(muted) {
    this.stream.getTracks().forEach((track) => { track.enabled = !muted; });
  }

  close() {
    this.stream.getTracks().forEach((track) => { track.onended = null; track.stop(); });
    this.#context.close();
  }
}
