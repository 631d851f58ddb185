// Calls of the server: the key, errors, streams, and what to do while it is away.

import { h } from './dom.js';
import { tab } from './store.js';

const KEY = 'piecework-key';
const MOST_EVENT = 64 * 1024 * 1024;

/** An answer that says what is wrong. */
export class ApiError extends Error {
  constructor(status, body, retryAfter) {
    const error = body?.error ?? {};
    super(typeof error.message === 'string' ? error.message : `The server answered ${status}.`);
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
    this.retryAfter = retryAfter;
  }
}

/** The server could not be reached, or a stream ended before its end. */
export class Away extends Error {}

/** Headers are bytes, and a key may be any text: each character of the result is a byte. */
function bytesOf(key) {
  return String.fromCharCode(...new TextEncoder().encode(key));
}

/** A response of status 200. Raises `ApiError` and `Away`; a missing key is asked for. */
export async function call(path, { body, signal, method } = {}) {
  for (;;) {
    const key = tab.get(KEY);
    const headers = {};
    if (key) headers.Authorization = `Bearer ${bytesOf(key)}`;
    if (body !== undefined) headers['Content-Type'] = 'application/json';
    let response;
    try {
      response = await fetch(path, {
        method: method ?? (body === undefined ? 'GET' : 'POST'),
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: 'no-store',
        credentials: 'same-origin',
        redirect: 'error',
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Away('The server cannot be reached.');
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (tab.get(KEY) === key) await askForKey(key !== null);
      continue;
    }
    let told = null;
    try {
      told = await response.json();
    } catch { /* no JSON: a proxy's error */ }
    throw new ApiError(response.status, told, Number(response.headers.get('retry-after')) || null);
  }
}

export async function getJson(path, options) {
  const response = await call(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (options?.signal?.aborted) throw error;
    throw new Away('The answer broke off.');
  }
}

/** The events of a streamed answer. Raises `Away` where it breaks off before `[DONE]`. */
export async function* stream(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Away('The answer broke off.');
      }
      if (part.done) throw new Away('The answer broke off.');
      rest += part.value;
      if (rest.length > MOST_EVENT) throw new Away('The answer cannot be read.');
      const events = rest.split('\n\n');
      rest = events.pop();
      for (const event of events) {
        const data = event.startsWith('data: ') ? event.slice(6) : null;
        if (data === '[DONE]') return;
        if (data !== null) {
          const told = JSON.parse(data);
          if (told.error) throw new ApiError(Number(told.error.code) || 500, told, null);
          yield told;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Whether the server serves now. */
export async function isHealthy() {
  try {
    const stop = AbortSignal.timeout(4000);
    return (await fetch('health', { cache: 'no-store', signal: stop })).ok;
  } catch {
    return false;
  }
}

let waiting = null;

/**
 * Until the server serves again, asking ever more seldom; `document` hears `away` and `back`.
 * One wait for all who wait.
 */
export function untilHealthy() {
  waiting ??= (async () => {
    document.dispatchEvent(new Event('away'));
    for (let pause = 400; !(await isHealthy()); pause = Math.min(pause * 1.5, 5000)) {
      await new Promise((resume) => setTimeout(resume, pause));
    }
    waiting = null;
    document.dispatchEvent(new Event('back'));
  })();
  return waiting;
}

let asking = null;

/** Ask for the key; one question for all calls that need it. Raises where there is no answer. */
function askForKey(wasWrong) {
  asking ??= new Promise((given, refused) => {
    const input = h('input', {
      type: 'password', name: 'key', autocomplete: 'off', required: true, id: 'key-input',
      'aria-describedby': 'key-why',
    });
    const dialog = h('dialog', { class: 'small', 'aria-labelledby': 'key-title' },
      h('form', {
        onsubmit: (event) => {
          event.preventDefault();
          tab.set(KEY, input.value.trim());
          given();
          dialog.close();
        },
      },
      h('h2', { id: 'key-title' }, 'API key'),
      h('p', { id: 'key-why' }, wasWrong ? 'The server does not know this key.'
        : 'This server asks for a key. It stays in this tab, and is forgotten with it.'),
      h('label', { for: 'key-input' }, 'Key'), input,
      h('div', { class: 'row end' }, h('button', { class: 'primary' }, 'Continue'))));
    dialog.addEventListener('close', () => {
      dialog.remove();
      asking = null;
      refused(new ApiError(401, { error: { message: 'This needs the API key.' } }, null));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
