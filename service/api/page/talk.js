// Requests to the service: the key, its errors, and whether it is there at all.

import { $, note, on } from "./show.js";

export const BYTES = "application/octet-stream";

let key = "";
let away = false;
const returned = []; // Called when the service, or the key, is there again.

export const onReturn = (call) => returned.push(call);
export const hasKey = () => Boolean(key);

/** An answer that is an error; its message is the service's own. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** GET `path`, or POST `body` to it; throws Refused for an error, and Away if there is no whole answer. */
export async function ask(path, body, type = BYTES, accept = "*/*") {
  const headers = { Accept: accept, ...(body && { "Content-Type": type }) };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    const answer = await fetch(path, { method: body ? "POST" : "GET", body, headers });
    response = new Response(await answer.arrayBuffer(), answer); // The connection may be lost until its end.
  } catch {
    goAway();
    throw new Away();
  }
  if (response.ok) return response;
  let message = `the service answered ${response.status}`;
  try {
    const { error } = await response.json();
    message = error.message ?? error;
  } catch { /* Of a proxy: it has no sentence of its own. */ }
  if (response.status === 401) {
    $("door").hidden = false;
    message = key ? "This key is not one of the service's." : "";
  }
  throw new Refused(response.status, message);
}

export class Away extends Error {}

/** Nothing is wrong any more, unless the service is away. */
export function noteSuccess() {
  if (!away) note("");
}

/** Ask, and show whatever goes wrong; undefined then. `failed` is called with the error, and is true where it has shown it. */
export async function attempt(call, failed) {
  try {
    return await call();
  } catch (error) {
    if (failed?.(error) === true) return undefined; // It has said so.
    if (error instanceof Refused) note(error.message, true);
    else if (!(error instanceof Away)) throw error;
    return undefined;
  }
}

/** `call`, one at a time: asked for meanwhile, it runs once more at the end, for the newest. */
export function newest(call, failed) {
  let running = false, again = false;
  return async () => {
    again = true;
    if (running) return;
    running = true;
    try {
      while (again) {
        again = false;
        await attempt(call, failed);
      }
    } finally {
      running = false;
    }
  };
}

function goAway() {
  if (away) return;
  away = true;
  note("The service does not answer. This page goes on asking.", true);
  const look = async () => {
    try {
      if (!(await fetch("readyz")).ok) throw new Away();
    } catch {
      setTimeout(look, 1000);
      return;
    }
    away = false;
    note("The service is back.");
    for (const call of returned) call();
  };
  setTimeout(look, 1000);
}

on("door", "submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("door").hidden = true;
  note("");
  for (const call of returned) call();
});
