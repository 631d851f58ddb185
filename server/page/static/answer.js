// One answer: streamed into its message, and gone on with where the connection or the server broke.

import { ApiError, Away, isHealthy, stream, untilHealthy } from './api.js';

const MOST_TRIES = 4;

/**
 * Ask for an answer and fill `node` with it: `text`, `thought`, `calls`, `reason`, `usage`,
 * `timing`, and `state`, which is `running` until it is `done`, `stopped` or `failed` with `error`.
 *
 * `body`: of the API's request, without what streaming adds. `onchange()` hears of each change.
 * With text in `node` the answer goes on from there. It begins anew where the chat template cannot
 * go on, and where it has a schema, which the rest alone would have to match; what there was comes
 * back where nothing takes its place.
 */
export async function answer(node, body, { signal, onchange }) {
  Object.assign(node, { state: 'running', error: null, reason: null, waits: false });
  const run = { tokens: 0, began: performance.now(), first: null, spent: 0 };
  let mayContinue = !body.response_format;
  const { text, thought, calls } = node;
  for (let tries = 0; ; tries += 1) {
    const goesOn = mayContinue && node.text !== '' && !node.calls.length;
    if (!goesOn) Object.assign(node, { text: '', thought: '', calls: [] });
    try {
      await take(node, requestOf(node, body, goesOn, run.tokens), run, { signal, onchange });
      // A server that stops ends what runs; one that is well was told to end it.
      if (node.reason === 'abort' && !(await isHealthy())) throw new Away('The server stops.');
      node.state = 'done';
      break;
    } catch (error) {
      if (signal.aborted) {
        node.state = 'stopped';
        break;
      }
      if (goesOn && error.code === 'chat_template_error') {
        mayContinue = false;
      } else if (tries < MOST_TRIES && await isAway(error)) {
        node.waits = true;
        onchange();
        await unlessAborted(untilHealthy(), signal);
        node.waits = false;
        if (signal.aborted) {
          node.state = 'stopped';
          break;
        }
      } else {
        node.state = 'failed';
        node.error = { message: String(error.message), code: error.code ?? null,
          param: error.param ?? null };
        break;
      }
    }
  }
  const isEmpty = !node.text && !node.thought && !node.calls.length;
  if (isEmpty) Object.assign(node, { text, thought, calls });
  node.waits = false;
  onchange();
}

/** Whether it is the server that fails: unreachable, or not ready. */
async function isAway(error) {
  if (error instanceof Away) return true;
  return error instanceof ApiError && [502, 503, 504].includes(error.status)
    && !(await isHealthy());
}

function unlessAborted(promise, signal) {
  return Promise.race([promise, new Promise((resolve) => {
    signal.addEventListener('abort', resolve, { once: true });
  })]);
}

function requestOf(node, body, goesOn, tokens) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  if (!goesOn) return request;
  if (body.max_tokens !== undefined) request.max_tokens = Math.max(1, body.max_tokens - tokens);
  return {
    ...request,
    messages: [...body.messages, { role: 'assistant', content: node.text }],
    continue_final_message: true,
    add_generation_prompt: false,
  };
}

async function take(node, request, run, { signal, onchange }) {
  const began = performance.now();
  for await (const event of stream('v1/chat/completions', request, signal)) {
    const choice = event.choices?.[0];
    if (choice) {
      if (hasNews(choice.delta)) {
        run.tokens += 1;
        run.first ??= performance.now() - run.began;
      }
      takeDelta(node, choice.delta ?? {});
      if (choice.finish_reason) node.reason = choice.finish_reason;
    }
    if (event.usage) node.usage = event.usage;
    if (event.model) node.model = event.model;
    const seconds = (performance.now() - began) / 1000;
    node.timing = { seconds, first: (run.first ?? 0) / 1000, tokens: run.tokens };
    onchange();
  }
}

function hasNews(delta) {
  return Boolean(delta?.content || delta?.reasoning_content || delta?.reasoning
    || delta?.tool_calls);
}

function takeDelta(node, delta) {
  if (typeof delta.content === 'string') node.text += delta.content;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (typeof thought === 'string') node.thought += thought;
  for (const part of delta.tool_calls ?? []) {
    const call = node.calls[part.index] ??= { id: '', name: '', arguments: '' };
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name = part.function.name;
    call.arguments += part.function?.arguments ?? '';
  }
}

/** How fast an answer was, in words; empty where nothing is known. */
export function speedOf(node) {
  const { timing, usage } = node;
  if (!timing || !timing.tokens) return '';
  const tokens = usage?.completion_tokens ?? timing.tokens;
  const spent = timing.seconds - timing.first;
  const parts = [`${tokens.toLocaleString('en')} tokens`];
  if (tokens > 1 && spent > 0.05) parts.push(`${((tokens - 1) / spent).toFixed(1)} tokens/s`);
  parts.push(`first after ${timing.first.toFixed(2)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens.toLocaleString('en')}${
      cached ? ` (${cached.toLocaleString('en')} cached)` : ''}`);
  }
  return parts.join(' · ');
}
